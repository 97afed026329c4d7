#!/usr/bin/env python
"""The worker of `benchmark_step.py --torch`: training steps in PyTorch, each on request. `torch_worker.py` starts it.

Its argument is a JSON object with `name`, `input_size`, `classes` and `alpha` (see `build`), and with
`batch_size`, `optimizer` (sgd or adam), `threads` and `compiled` (whether `torch.compile` is tried). It first prints
what it is in one line of JSON: the version of PyTorch, the variants, and why others are missing. Then it reads names of
variants, one a line, runs one step of each, and answers with the step's time in ms. Steps are full training at learning
rate 0, with PyTorch's fused optimizers.

The networks are the paper's, with the layers and weights that Keras' have here; a test compares the weights. They take
images [batch, 3, size, size] in 0…255 and return logits [batch, classes]. PyTorch is in an environment of its own.
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
from torch import nn
from torch.nn import functional

DROPOUT, BLOCK_DROPOUT = 0.2, 0.1  # before the head, as in models.py; in ViT's blocks, as in vit-keras

OPTIMIZERS = {"sgd": partial(torch.optim.SGD, momentum=0.9), "adam": torch.optim.Adam}


class _Scaled(nn.Module):
    """Images in 0…255 to -1…1. Keras' networks scale them differently at the same cost."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images / 127.5 - 1


def _convolution(
    inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1, bias: bool = False
) -> nn.Sequential:
    """A convolution and its batch norm."""
    convolution = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=bias)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


class _Residual(nn.Module):
    """The sum of a branch and a shortcut, and what follows it."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module, after: nn.Module) -> None:
        super().__init__()
        self.branch, self.shortcut, self.after = branch, shortcut, after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.branch(x) + self.shortcut(x))


def _mobilenetv2(alpha: float) -> tuple[list[nn.Module], int]:
    def width(channels: float) -> int:  # a multiple of 8 that is at least 0.9 of what is asked for
        rounded = max(8, int(channels * alpha + 4) // 8 * 8)
        return rounded if rounded >= 0.9 * channels * alpha else rounded + 8

    channels = width(32)
    layers: list[nn.Module] = [_convolution(3, channels, 3, 2), nn.ReLU6()]
    stages = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    for expansion, wanted, count, first_stride in stages:
        for stride in (first_stride, *[1] * (count - 1)):
            inner, outputs = channels * expansion, width(wanted)
            expand = [_convolution(channels, inner, 1), nn.ReLU6()] if expansion > 1 else []
            depthwise = [_convolution(inner, inner, 3, stride, groups=inner), nn.ReLU6()]
            branch = nn.Sequential(*expand, *depthwise, _convolution(inner, outputs, 1))
            is_residual = stride == 1 and channels == outputs
            layers.append(_Residual(branch, nn.Identity(), nn.Identity()) if is_residual else branch)
            channels = outputs
    last = width(1280) if alpha > 1 else 1280
    return [*layers, _convolution(channels, last, 1), nn.ReLU6()], last


def _resnet50(alpha: float) -> tuple[list[nn.Module], int]:
    layers: list[nn.Module] = [_convolution(3, 64, 7, 2, bias=True), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for inner, count, first_stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for stride in (first_stride, *[1] * (count - 1)):
            outputs = 4 * inner
            branch = nn.Sequential(
                *(_convolution(channels, inner, 1, stride, bias=True), nn.ReLU()),
                *(_convolution(inner, inner, 3, bias=True), nn.ReLU()),
                _convolution(inner, outputs, 1, bias=True),
            )
            is_wider = channels != outputs
            shortcut = _convolution(channels, outputs, 1, stride, bias=True) if is_wider else nn.Identity()
            layers.append(_Residual(branch, shortcut, nn.ReLU()))
            channels = outputs
    return layers, channels


def _vgg16(alpha: float) -> tuple[list[nn.Module], int]:
    layers: list[nn.Module] = []
    channels = 3
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return layers, channels


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        ]
        return self.out(functional.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))


class _ViT(nn.Module):
    """ViT-B/16 without its head: the features [batch, 768] of the class token."""

    def __init__(self, input_size: int, width: int = 768, heads: int = 12, depth: int = 12, patch: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, (input_size // patch) ** 2 + 1, width) * 0.05)
        blocks: list[nn.Module] = []
        for _ in range(depth):
            dropout = nn.Dropout(BLOCK_DROPOUT)
            attention = nn.Sequential(nn.LayerNorm(width, eps=1e-6), _Attention(width, heads), dropout)
            dense = nn.Linear(width, 4 * width), nn.GELU(), dropout, nn.Linear(4 * width, width), dropout
            blocks.append(_Residual(attention, nn.Identity(), nn.Identity()))
            blocks.append(_Residual(nn.Sequential(nn.LayerNorm(width, eps=1e-6), *dense), nn.Identity(), nn.Identity()))
        self.blocks = nn.Sequential(*blocks, nn.LayerNorm(width, eps=1e-6))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        patches = self.embedding(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(images), -1, -1), patches], dim=1)
        return self.blocks(x + self.positions)[:, 0]


BACKBONES = {"mobilenetv2": _mobilenetv2, "resnet50": _resnet50, "vgg16": _vgg16}


def build(name: str, input_size: int, classes: int, alpha: float) -> nn.Module:
    """The network called `name` ("vit" or one of BACKBONES) for training: statistics of batch norm are frozen.

    Args:
        name, input_size, classes, alpha: as for `models.build_model`.
    """
    if name == "vit":
        layers, width = [_ViT(input_size)], 768
    else:
        layers, width = BACKBONES[name](alpha)
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    network = nn.Sequential(_Scaled(), *layers, nn.Dropout(DROPOUT), nn.Linear(width, classes)).train()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return network


def make_step(network: Any, forward: Any, settings: dict[str, Any], layout: Any) -> Callable[[], float]:
    """One step of full training of `network`, whose logits are `forward(images)`; returns the loss."""
    batch_size, size = settings["batch_size"], settings["input_size"]
    images = (255 * torch.rand(batch_size, 3, size, size)).to(memory_format=layout)
    labels = torch.zeros(batch_size, dtype=torch.long)
    optimizer = OPTIMIZERS[settings["optimizer"]](network.parameters(), lr=0.0, fused=True)

    def step() -> float:
        optimizer.zero_grad()
        loss = functional.cross_entropy(forward(images), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def make_steps(settings: dict[str, Any]) -> tuple[dict[str, Callable[[], float]], dict[str, str]]:
    """The steps by variant, each run once, and the variants that cannot be run with the reason."""
    described = [settings[key] for key in ("name", "input_size", "classes", "alpha")]
    steps = {}
    for variant, layout in (("eager", torch.contiguous_format), ("channels_last", torch.channels_last)):
        network = build(*described).to(memory_format=layout)
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
