#!/usr/bin/env python
"""A training step beside PyTorch's of the same network: all of it, its upper half, and that from cached features.

Needs PyTorch and torchvision (`pip install torch torchvision`). Both train the same layers with SGD with momentum at
rate 0; batch norm keeps its statistics, and its scales and shifts train. In PyTorch, the layers below the upper half
have `requires_grad_(False)`; its upper half from features takes their output from memory. Steps of both alternate in
one process, on the same random images:

    ours      as `main.py` trains: frozen batch norm folded, with and without products for convolutions
    keras     `train_on_batch`
    pytorch   eager, in channels_last, and compiled (`torch.compile`) in channels_last

    python scripts/benchmarks/benchmark_pytorch.py --alpha 0.35 --input_size 160 --batch_size 32
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import common  # first: it sets the import path
import numpy as np
from benchmark_step import keras_step
from common import Setting, few_digits

import models
from elastic_trainer.engine.prefix import split_step
from elastic_trainer.engine.step import TrainStep
from elastic_trainer.engine.task import ImageClassification
from elastic_trainer.networks.tensors import all_mask, head_mask
from elastic_trainer.system.errors import UserError
from elastic_trainer.timing.measuring import idle_optimizer, measure_steps

CLASSES = 10
# The layers of the upper half: in Keras, by the start of their names; in torchvision, all from this stage on, counted
# without the head.
UPPER = {
    "mobilenetv2": ((*(f"block_{block}_" for block in range(9, 17)), "Conv_1"), 10),
    "resnet50": ((*(f"conv4_block{block}_" for block in range(2, 7)), "conv5_"), 9),
}
Step = Callable[[], Any]


def stages_of(name: str, alpha: float) -> tuple[list[Any], Any]:
    """The stages of torchvision's network in their order, and its head."""
    import torch
    import torchvision

    if name == "mobilenetv2":
        network = torchvision.models.mobilenet_v2(width_mult=alpha, num_classes=CLASSES)
        head = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), network.classifier)
        return [*network.features], head
    network = torchvision.models.resnet50(num_classes=CLASSES)
    below = torch.nn.Sequential(network.conv1, network.bn1, network.relu, network.maxpool)
    blocks = [block for layer in (network.layer1, network.layer2, network.layer3, network.layer4) for block in layer]
    return [below, *blocks], torch.nn.Sequential(network.avgpool, torch.nn.Flatten(), network.fc)


def pytorch_steps(name: str, alpha: float, images: np.ndarray) -> dict[tuple[str, str], Step]:
    """PyTorch's steps by what they train and how; `images`: float32 [examples, height, width, 3]."""
    import torch

    labels = torch.zeros(len(images), dtype=torch.long)
    criterion = torch.nn.CrossEntropyLoss()
    first = UPPER[name][1]
    steps: dict[tuple[str, str], Step] = {}
    for variant in ("eager", "channels_last", "compiled"):
        layout = torch.contiguous_format if variant == "eager" else torch.channels_last
        inputs = torch.from_numpy(np.moveaxis(images, -1, 1).copy()).to(memory_format=layout)
        for part in ("full", "upper", "upper_cached"):
            stages, head = stages_of(name, alpha)
            network = torch.nn.Sequential(*stages, head).train().to(memory_format=layout)
            for module in network.modules():
                if isinstance(module, torch.nn.BatchNorm2d):
                    module.eval()
            lower, upper = network[:first], network[first:]
            if part != "full":
                lower.requires_grad_(False)
            called, values = (upper, lower(inputs).detach()) if part == "upper_cached" else (network, inputs)
            trained = [each for each in called.parameters() if each.requires_grad]
            optimizer = torch.optim.SGD(trained, lr=0.0, momentum=0.9, fused=True)
            function = torch.compile(called) if variant == "compiled" else called

            def step(function: Any = function, values: Any = values, optimizer: Any = optimizer) -> float:
                optimizer.zero_grad(set_to_none=True)
                loss = criterion(function(values), labels)
                loss.backward()
                optimizer.step()
                return float(loss.item())

            steps[part, f"pytorch_{variant}"] = step
    return steps


def our_steps(args: argparse.Namespace, data: Any) -> dict[tuple[str, str], Step]:
    """Our steps and Keras' by what they train and how."""
    network = args.network
    model = models.build(network)
    [batch] = data.train(0)
    optimizer = idle_optimizer(model, network.optimizer)
    starts = UPPER[network.model_name][0]
    owners = {id(variable): layer.name for layer in model._flatten_layers() for variable in layer._trainable_variables}
    upper = np.array([owners[id(variable)].startswith(starts) for variable in model.trainable_variables])
    assert upper.any()
    steps: dict[tuple[str, str], Step] = {}
    for part, mask in (("full", all_mask(model)), ("upper", upper | head_mask(model))):
        for variant in ("folded", "products"):
            step = TrainStep(
                ImageClassification(model), optimizer, data.batch_size, mask, with_products=variant == "products"
            )
            steps[part, variant] = partial(step, batch.inputs, batch.targets)
            split = split_step(step)
            if split is not None:
                steps[f"{part}_cached", variant] = partial(split, split.prefix(batch.inputs), batch.targets)
    return {**steps, ("full", "keras"): keras_step(model, network, data)}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Medians of all steps in ms, and ours over the best of PyTorch's."""
    if not find_spec("torchvision"):
        raise UserError("PyTorch is missing; install it with: pip install torch torchvision")
    network = args.network
    if network.model_name not in UPPER:
        raise UserError(f"--model_name {network.model_name}: must be one of {', '.join(UPPER)}")
    data = few_digits(network, 1)
    [batch] = data.train(0)
    steps = our_steps(args, data) | pytorch_steps(
        network.model_name, network.alpha, np.asarray(batch.inputs, np.float32)
    )
    times = measure_steps([*steps.values()], args.seconds, fewest=args.rounds)
    step_ms: dict[str, dict[str, float]] = {}
    for (part, variant), median in zip(steps, np.median(times, axis=0).tolist(), strict=True):
        step_ms.setdefault(part, {})[variant] = median
    best = {
        part: (min(ms[each] for each in ("folded", "products")), min(ms[each] for each in ms if "pytorch" in each))
        for part, ms in step_ms.items()
    }
    return {
        "optimizer": network.optimizer,
        "pytorch": metadata.version("torch"),
        "rounds": len(times),
        "step_ms": step_ms,
        "over_best_pytorch": {part: ours / theirs for part, (ours, theirs) in best.items()},
        "full_over_keras": best["full"][0] / step_ms["full"]["keras"],
    }


SETTINGS = {
    "seconds": Setting(120.0, 3.0, "time for measuring steps"),
    "rounds": Setting(5, 2, "fewest rounds"),
}

if __name__ == "__main__":
    common.run_benchmark(__doc__, SETTINGS, measure)
