#!/usr/bin/env python
"""The worker of `benchmark_step.py --torch`: training steps in PyTorch, each on request. `torch_worker.py` starts it.

Its argument is a JSON object with `name`, `input_size`, `classes` and `alpha` (see `torch_networks.build`), and with
`batch_size`, `optimizer` (sgd or adam), `threads` and `compiled` (whether `torch.compile` is tried). It first prints
what it is in one line of JSON: the version of PyTorch, the variants, and why others are missing. Then it reads names of
variants, one a line, runs one step of each, and answers with the step's time in ms. Steps are full training at learning
rate 0, with PyTorch's fused optimizers.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch_networks
from torch.nn.functional import cross_entropy

OPTIMIZERS = {"sgd": partial(torch.optim.SGD, momentum=0.9), "adam": torch.optim.Adam}


def make_step(network: Any, forward: Any, settings: dict[str, Any], layout: Any) -> Callable[[], float]:
    """One step of full training of `network`, whose logits are `forward(images)`; returns the loss."""
    batch_size, size = settings["batch_size"], settings["input_size"]
    images = (255 * torch.rand(batch_size, 3, size, size)).to(memory_format=layout)
    labels = torch.zeros(batch_size, dtype=torch.long)
    optimizer = OPTIMIZERS[settings["optimizer"]](network.parameters(), lr=0.0, fused=True)

    def step() -> float:
        optimizer.zero_grad()
        loss = cross_entropy(forward(images), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def make_steps(settings: dict[str, Any]) -> tuple[dict[str, Callable[[], float]], dict[str, str]]:
    """The steps by variant, each run once, and the variants that cannot be run with the reason."""
    build = [settings[key] for key in ("name", "input_size", "classes", "alpha")]
    steps = {}
    for variant, layout in (("eager", torch.contiguous_format), ("channels_last", torch.channels_last)):
        network = torch_networks.build(*build).to(memory_format=layout)
        steps[variant] = make_step(network, network, settings, layout)
        steps[variant]()
    if not settings["compiled"]:
        return steps, {"compiled": "left out"}
    compiled = make_step(network, torch.compile(network), settings, torch.channels_last)
    try:
        compiled()
    except Exception as error:  # of any kind: no compiler, no headers, an operation that it does not know
        return steps, {"compiled": f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"}
    return {**steps, "compiled": compiled}, {}


def main() -> None:
    settings = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what others print must not look like an answer
    torch.set_flush_denormal(True)  # as TensorFlow does; threads that start later do so, too
    torch.set_num_threads(settings["threads"])
    steps, missing = make_steps(settings)
    print(json.dumps({"version": torch.__version__, "variants": [*steps], "missing": missing}), file=answers)
    for line in sys.stdin:
        start = time.perf_counter()
        steps[line.strip()]()
        print(1e3 * (time.perf_counter() - start), file=answers)


if __name__ == "__main__":
    main()
