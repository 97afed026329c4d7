"""Loads the weights that training starts from (`--weights`): ImageNet's, a file, or the model of an earlier run.

The paper starts from ImageNet weights (section 6). A file that does not fit, or is damaged, is refused: Keras would
silently keep random weights for some layers.
"""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import keras

from elastic_trainer.errors import UserError, first_line
from elastic_trainer.networks.names import is_custom_model
from elastic_trainer.networks.saved_model import check_finite, load_model
from elastic_trainer.networks.tensors import head_mask
from elastic_trainer.settings import BEST_MODEL, LAST_MODEL

KINDS = ".h5, .weights.h5, .keras, .npz (ViT), or the folder of a run that saved its model"


def load(model: keras.Model, backbone: keras.Model, path: Path, name: str) -> None:
    """Load the weights in `path` into `model`, or into its `backbone` if the file has no top layers.

    Args:
        model: a classifier.
        backbone: the part of `model` without the head; of a custom model the user's model, head included.
        path: .h5 or .weights.h5 of the backbone, .npz of vit-keras, a .keras file, or the folder of a run. The last two
            also supply the head if the number of classes is the same; otherwise the head stays new, and a message
            says this.
        name: of the network.

    Raises:
        UserError: the file is missing, damaged, or belongs to another network.
    """
    if not path.exists():
        raise UserError(f"--weights {path}: there is no such file or folder; give {KINDS}")
    if path.is_dir():
        path = _model_of_run(path)
    if path.suffix == ".keras":
        _from_model(model, path, name)
    elif path.suffix == ".npz":
        _from_numpy(backbone, path, name)
    elif path.suffix == ".h5":
        _from_h5(backbone, path, name)
    else:
        raise UserError(f"--weights {path}: must be one of {KINDS}")
    check_finite(model, f"--weights {path}")


def _model_of_run(folder: Path) -> Path:
    for file in (BEST_MODEL, LAST_MODEL):
        if (folder / file).is_file():
            return folder / file
    raise UserError(f"--weights {folder}: has no best.keras; a run saves it with --save_model or --export")


def _from_h5(backbone: keras.Model, path: Path, name: str) -> None:
    what = name if is_custom_model(name) else f"{name} without its top layers"
    try:
        _count_arrays(path)
    except Exception as error:  # h5py raises many types for a damaged file
        raise UserError(f"--weights {path}: is not an HDF5 file, or is damaged: {first_line(error)}") from error
    _load_all(backbone, path, f"--weights {path}: does not fit {what}")


def _load_all(model: keras.Model, path: Path, refusal: str) -> None:
    """Load all weights in an .h5, .weights.h5 or .keras file into all layers of `model`.

    Raises:
        UserError: a layer has other weights or none in the file (which Keras skips with a warning), or the file has
            weights that no layer asks for, as of a deeper network (which Keras ignores). It starts with `refusal`.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Skipping")
            model.load_weights(path)
        arrays = _count_arrays(path)
    except Exception as error:  # Keras and h5py raise many types for a file that does not fit
        raise UserError(f"{refusal}: {_mismatch(error)}") from error
    if arrays > len(model.weights):
        raise UserError(f"{refusal}: it has {arrays} arrays, the network has {len(model.weights)}")


def _count_arrays(path: Path) -> int:
    """Number of weights in a file of Keras, without those of an optimizer or a random seed."""
    import h5py  # a dependency of Keras

    names: list[str] = []
    with ExitStack() as stack:
        source: Any = path
        if path.suffix == ".keras":
            source = stack.enter_context(stack.enter_context(zipfile.ZipFile(path)).open("model.weights.h5"))
        file = stack.enter_context(h5py.File(source))
        file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
    return sum("optimizer" not in name and "seed_generator" not in name for name in names)


def _mismatch(error: Exception) -> str:
    """The first line of Keras' error, and its example of a layer that does not fit, if it gives one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[0] if len(lines) == 1 or not lines[0].endswith(":") else f"{lines[0]} {lines[1][:300]}"


def _from_numpy(backbone: keras.Model, path: Path, name: str) -> None:
    """Load ViT's weights as vit-keras publishes them. The position table is interpolated to the input size."""
    from vit_keras import utils as vit_utils

    if name != "vit":
        raise UserError(f"--weights {path}: an .npz file is for vit; {name} takes {KINDS}")
    patches = backbone.input_shape[1] // 16
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            vit_utils.load_weights_numpy(backbone, path, False, patches, patches)
    except Exception as error:  # vit-keras raises assertion errors, key errors and shape errors
        reason = f"lacks {error}" if isinstance(error, KeyError) else first_line(error)
        raise UserError(f"--weights {path}: is damaged or does not fit ViT-B/16: {reason}") from error
    for warning in caught:
        if "Resizing" in str(warning.message):
            print(f"{path.name}: position table interpolated to {patches}×{patches} patches")


def load_saved(model: keras.Model, path: Path, flag: str, name: str) -> None:
    """Load all weights of a .keras file of the same network into `model`.

    Args:
        model: with the layers of the saved one.
        path: the file.
        flag, name: the command-line flag and the network, for the error message.

    Raises:
        UserError: the file is damaged, or belongs to another network.
    """
    _load_all(model, path, f"{flag} {path}: does not fit {name}")
    check_finite(model, f"{flag} {path}")


def _from_model(model: keras.Model, path: Path, name: str) -> None:
    """Load the weights of a saved model with the same layers, but possibly with another number of classes."""
    try:
        source = load_model(path, "--weights").weights
    except UserError:
        if not is_custom_model(name):
            raise
        load_saved(model, path, "--weights", name)  # Keras cannot build custom layers, but can load their weights
        return
    if _shapes(source) == _shapes(model.weights):
        for weight, given in zip(model.weights, source, strict=True):
            weight.assign(given)
        return
    is_head = head_mask(model)
    head = [variable for variable, taken in zip(model.trainable_variables, is_head, strict=True) if taken]
    in_head = set(map(id, head))
    body = [weight for weight in model.weights if id(weight) not in in_head]
    rest = source[len(body) :]
    # A network with a name is known by its backbone, so other layers may follow. A custom one has just its head.
    has_other_layers = is_custom_model(name) and [s[:-1] for s in _shapes(rest)] != [s[:-1] for s in _shapes(head)]
    if _shapes(source[: len(body)]) != _shapes(body) or (rest and has_other_layers):
        raise UserError(f"--weights {path}: does not fit {name}: {_difference([*body, *head], source)}")
    for weight, given in zip(body, source, strict=False):
        weight.assign(given)
    classes = f"{rest[-1].shape[-1]}-class " if rest else ""
    print(f"{path}: replacing its {classes}head with a new {model.output_shape[-1]}-class one")


def _shapes(weights: Sequence[Any]) -> list[tuple[int, ...]]:
    return [tuple(weight.shape) for weight in weights]


def _difference(weights: Sequence[Any], source: Sequence[Any]) -> str:
    """Describes the first of the network's weights, the head last, that differs from the saved model."""
    for weight, given in zip(weights, source, strict=False):
        if tuple(weight.shape) != tuple(given.shape):
            return f"{weight.path} is {tuple(weight.shape)}, the file has {tuple(given.shape)}"
    return f"the network has {len(weights)} weights, the file has {len(source)}"
