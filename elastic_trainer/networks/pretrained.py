"""Weights a network starts from: ImageNet's, a file of Keras' or vit-keras', or what an earlier run has learned."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

import utils
from elastic_trainer.networks.names import is_own_model
from elastic_trainer.networks.saved_model import load_model
from elastic_trainer.networks.tensors import head_mask
from utils import UserError

if TYPE_CHECKING:
    import h5py

KINDS = ".h5, .weights.h5, .keras, .npz (ViT), or the folder of a run that kept its model"


def with_imagenet_weights(build: Callable[[str], keras.Model], name: str, alpha: float) -> keras.Model:
    """The backbone that `build("imagenet")` makes, with ImageNet's weights from Keras or vit-keras.

    Raises:
        UserError: there are none for this width, or they cannot be downloaded; says which file can be put where.
    """
    try:
        return build("imagenet")
    except ValueError as error:  # a width for which no weights exist
        raise UserError(f"--weights imagenet: {name} at --alpha {alpha:g}: {utils.first_line(error)}") from error
    except Exception as error:  # Keras raises a bare Exception when its download fails
        url = re.search(r"https?://\S+\.(?:h5|npz)", str(error))
        where = f"{url[0]} where there is" if url else "them where there is"
        raise UserError(
            f"--weights imagenet: the weights of {name} cannot be downloaded; without a network here, fetch {where} "
            "one and give --weights FILE, or --weights none"
        ) from error


def load(model: keras.Model, backbone: keras.Model, path: Path, name: str) -> None:
    """Give `model` the weights in `path`: those of its `backbone` alone, or of all of it.

    Args:
        model: a classifier.
        backbone: the part of it that a file without the top layers belongs to.
        path: .h5 or .weights.h5 of the backbone, .npz of vit-keras, a .keras file, or the folder of a run. The head of
            the latter two is taken where it has as many classes, else a new one stays (said so).
        name: of the network.

    Raises:
        UserError: there is no such file, or it is damaged or of another network.
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
    if not all(np.isfinite(weight.numpy()).all() for weight in model.weights):
        raise UserError(f"--weights {path}: holds weights that are no finite numbers; the file is damaged")


def _model_of_run(folder: Path) -> Path:
    for file in ("best.keras", "last.keras"):
        if (folder / file).is_file():
            return folder / file
    raise UserError(f"--weights {folder}: holds no best.keras; a run keeps it with --save_model or --export")


def _from_h5(backbone: keras.Model, path: Path, name: str) -> None:
    import h5py  # Keras brings it

    what = name if is_own_model(name) else f"{name} without its top layers"

    try:
        with h5py.File(path) as file:
            arrays = _count_arrays(file)
    except Exception as error:  # h5py raises many kinds for a file that is none of its own, or damaged
        raise UserError(f"--weights {path}: is no HDF5 file, or a damaged one: {utils.first_line(error)}") from error
    try:
        with every_layer():
            backbone.load_weights(path)
    except Exception as error:  # so does Keras for a file that does not fit
        raise UserError(f"--weights {path}: does not fit {what}: {_reason(error)}") from error
    # Keras takes what it finds and says nothing of what is left over, as from a deeper network.
    if arrays > len(backbone.weights) and not is_own_model(name):
        raise UserError(
            f"--weights {path}: does not fit {what}: it holds {arrays} arrays, the network has {len(backbone.weights)}"
        )


@contextmanager
def every_layer() -> Iterator[None]:
    """Keras raises in this block where it would skip a layer that does not fit, and only warn."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Skipping")
        yield


def _count_arrays(file: h5py.File) -> int:
    """Weights in a file of Keras', without what an optimizer or a random seed left there."""
    import h5py

    names: list[str] = []
    file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
    return sum("optimizer" not in name and "seed_generator" not in name for name in names)


def _reason(error: Exception) -> str:
    """Why Keras could not load: its first line, and the example it gives of the layers that do not fit."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[0] if len(lines) == 1 or not lines[0].endswith(":") else f"{lines[0]} {lines[1][:300]}"


def _from_numpy(backbone: keras.Model, path: Path, name: str) -> None:
    """ViT's weights as vit-keras publishes them; the position table is interpolated to the input's size."""
    from vit_keras import utils as vit_utils

    if name != "vit":
        raise UserError(f"--weights {path}: an .npz file is for vit; {name} takes {KINDS}")
    patches = backbone.input_shape[1] // 16
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            vit_utils.load_weights_numpy(backbone, path, False, patches, patches)
    except Exception as error:  # an assertion, a missing key, a shape: it has no error of its own
        reason = f"has no {error}" if isinstance(error, KeyError) else utils.first_line(error)
        raise UserError(f"--weights {path}: is damaged or does not fit ViT-B/16: {reason}") from error
    for warning in said:
        if "Resizing" in str(warning.message):
            print(f"{path.name}: position table interpolated to {patches}×{patches} patches")


def load_saved(model: keras.Model, path: Path, flag: str, name: str) -> None:
    """Give `model` all weights of a .keras file of the same network, called `name`. Raises `UserError`."""
    try:
        with every_layer():
            model.load_weights(path)
    except Exception as error:  # Keras and h5py raise many kinds for a file that does not fit
        raise UserError(f"{flag} {path}: does not fit {name}: {utils.first_line(error)}") from error


def _from_model(model: keras.Model, path: Path, name: str) -> None:
    """Take over the weights of a saved model with the same layers, but perhaps for other classes."""
    try:
        source = load_model(path, "--weights").weights
    except UserError:
        if not is_own_model(name):
            raise
        load_saved(model, path, "--weights", name)  # Keras cannot make the user's layers, but fill those that are there
        return
    is_head = head_mask(model)
    head = [variable for variable, taken in zip(model.trainable_variables, is_head, strict=True) if taken]
    in_head = set(map(id, head))
    body = [weight for weight in model.weights if id(weight) not in in_head]
    rest = source[len(body) :]
    if _shapes(source[: len(body)]) != _shapes(body):
        raise UserError(f"--weights {path}: does not fit {name}: {_difference(body, source)}")
    for weight, given in zip(body, source, strict=False):
        weight.assign(given)
    if _shapes(rest) == _shapes(head):
        for weight, given in zip(head, rest, strict=True):
            weight.assign(given)
    else:
        classes = f"for {rest[-1].shape[-1]} outputs " if rest else ""
        print(f"{path}: its head {classes}is not taken; a new one is for {model.output_shape[-1]} classes")


def _shapes(weights: Sequence[Any]) -> list[tuple[int, ...]]:
    return [tuple(weight.shape) for weight in weights]


def _difference(body: Sequence[Any], source: Sequence[Any]) -> str:
    """The first weight of the network that a saved model does not have."""
    for weight, given in zip(body, source, strict=False):
        if tuple(weight.shape) != tuple(given.shape):
            return f"{weight.path} is {tuple(weight.shape)}, in the file {tuple(given.shape)}"
    return f"the network has {len(body)} weights below its head, the file {len(source)}"
