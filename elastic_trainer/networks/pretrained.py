"""Loads the weights that training starts from (`--weights`): ImageNet's, a file, or the model of an earlier run.

The paper starts from ImageNet weights. A file that does not fit, or is damaged, is refused: Keras would
silently keep random weights for some layers.
"""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np

from elastic_trainer.networks.saved_model import check_finite, load_model
from elastic_trainer.networks.tensors import head_mask
from elastic_trainer.settings import BEST_MODEL, LAST_MODEL
from elastic_trainer.settings.network_names import is_custom_model
from elastic_trainer.system.errors import UserError, first_few, first_line
from elastic_trainer.system.files import check_unpacked

KINDS = ".h5, .weights.h5, .keras, or the folder of a run that saved its model"


class Classes(NamedTuple):
    """Names of a network's classes, in the order of its outputs, and of those that the weights of its head are for."""

    now: Sequence[str]
    before: Sequence[str]


def load(model: keras.Model, backbone: keras.Model, path: Path, name: str, classes: Classes | None = None) -> None:
    """Load the weights in `path` into `model`, or into its `backbone` if the file has no top layers.

    Args:
        model: a classifier.
        backbone: the part of `model` without the head; of a custom model the user's model, head included.
        path: .h5 or .weights.h5 of the backbone, a .keras file, or the folder of a run. The last two also supply the
            head, see `_keep_head`.
        name: of the network, for the error if the file is missing, damaged, or belongs to another network.
        classes: of the network and of the model in `path`; None if the names of either are unknown.
    """
    if not path.exists():
        raise UserError(f"--weights {path}: there is no such file or folder; give {KINDS}")
    if path.is_dir():
        path = _model_of_run(path)
    if path.suffix == ".keras":
        _from_model(model, path, name, classes)
    elif path.suffix == ".h5":
        load_saved(backbone, path, "--weights", name if is_custom_model(name) else f"{name} without its top layers")
    else:
        raise UserError(f"--weights {path}: must be one of {KINDS}")
    check_finite(model, f"--weights {path}")


def _model_of_run(folder: Path) -> Path:
    for file in (BEST_MODEL, LAST_MODEL):
        if (folder / file).is_file():
            return folder / file
    raise UserError(f"--weights {folder}: has no best.keras; a run saves it with --save_model or --export")


def load_saved(model: keras.Model, path: Path, flag: str, name: str) -> None:
    """Load all weights in an .h5, .weights.h5 or .keras file into all layers of `model`.

    Raises `UserError`, with the flag and the network's name, if the file is damaged, if a layer has other weights or
    none in it (which Keras skips with a warning), or if it has weights for no layer here (which Keras ignores).
    """
    try:
        arrays = _count_arrays(path)
    except Exception as error:  # h5py raises many types for a damaged file
        raise UserError(f"{flag} {path}: is not a file of weights, or is damaged: {first_line(error)}") from error
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Skipping")
            model.load_weights(path)
    except Exception as error:  # Keras raises many types for a file that does not fit
        raise UserError(f"{flag} {path}: does not fit {name}: {_mismatch(error)}") from error
    if arrays > len(model.weights):
        raise UserError(
            f"{flag} {path}: does not fit {name}: it has {arrays} arrays, the network has {len(model.weights)}"
        )
    check_finite(model, f"{flag} {path}")


def _count_arrays(path: Path) -> int:
    """Number of weights in a file of Keras, without those of an optimizer or a random seed."""
    import h5py  # a dependency of Keras

    names: list[str] = []

    def note(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            names.append(name)
            if item.external or item.is_virtual:  # other files of this machine
                raise ValueError(f"{name} is in another file")

    with ExitStack() as stack:
        source: Any = path
        if path.suffix == ".keras":
            archive = stack.enter_context(zipfile.ZipFile(path))
            check_unpacked(archive)
            source = stack.enter_context(archive.open("model.weights.h5"))
        file = stack.enter_context(h5py.File(source))
        file.visititems(note)
    return sum("optimizer" not in name and "seed_generator" not in name for name in names)


def _mismatch(error: Exception) -> str:
    """The first line of Keras' error, and its example of a layer that does not fit, if it gives one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[0] if len(lines) == 1 or not lines[0].endswith(":") else f"{lines[0]} {lines[1][:300]}"


def _from_model(model: keras.Model, path: Path, name: str, classes: Classes | None) -> None:
    """Load the weights of a saved model with the same layers, but possibly with other classes."""
    is_head = head_mask(model)
    head = [variable for variable, taken in zip(model.trainable_variables, is_head, strict=True) if taken]
    new = [np.array(variable) for variable in head]
    try:
        source = load_model(path, "--weights").weights
    except UserError:
        if not is_custom_model(name):
            raise
        load_saved(model, path, "--weights", name)  # Keras cannot build custom layers, but can load their weights
        source = model.weights
    own, given = model.weights, head
    if _shapes(source) != _shapes(own):
        in_head = set(map(id, head))
        own = [weight for weight in own if id(weight) not in in_head]
        given = source[len(own) :]
        # A network with a name is known by its backbone, so other layers may follow. A custom one has just its head.
        has_other_layers = is_custom_model(name) and [s[:-1] for s in _shapes(given)] != [s[:-1] for s in _shapes(head)]
        if _shapes(source[: len(own)]) != _shapes(own) or (given and has_other_layers):
            raise UserError(f"--weights {path}: does not fit {name}: {_difference([*own, *head], source)}")
    for weight, saved in zip(own, source, strict=False):
        weight.assign(saved)
    _keep_head(head, new, [np.array(weight) for weight in given], model.output_shape[-1], path, classes)


def _keep_head(
    head: Sequence[keras.Variable],
    new: Sequence[np.ndarray],
    given: Sequence[np.ndarray],
    outputs: int,
    path: Path,
    classes: Classes | None,
) -> None:
    """Take over what a saved head, `given`, knows of the classes, else `new`; print what that is.

    Where the names of classes are known, the outputs of known ones are kept. Else the head is kept if it has the same
    number of `outputs`, which are the last axis of its variables.
    """
    before, known = given[-1].shape[-1] if given and given[-1].ndim else 0, list[str]()
    if _shapes(given) == _shapes(new) and (classes is None or [*classes.now] == [*classes.before]):
        new, known = given, [*classes.now] if classes else []
    elif classes is None:
        print(f"{path}: replacing its {f'{before}-class ' if given else ''}head with a new {outputs}-class one")
    elif all(shape[-1:] == (outputs,) for shape in _shapes(new)) and _shapes(given) == [
        (*shape[:-1], before) for shape in _shapes(new)
    ]:
        known = [name for name in classes.now if name in classes.before]
        for array, saved in zip(new, given, strict=True):
            for name in known:
                array[..., [*classes.now].index(name)] = saved[..., [*classes.before].index(name)]
    for variable, array in zip(head, new, strict=True):
        variable.assign(array)
    if classes is not None:
        unknown = [f"'{name}'" for name in classes.now if name not in known]
        kept = f"its head is kept for {len(known)} of {len(classes.now)} classes ({first_few(known)})"
        start = f"the head starts new for {first_few(unknown)}"
        print(f"--weights {path}: {'; '.join([kept] * bool(known) + [start] * bool(unknown))}")


def _shapes(weights: Sequence[Any]) -> list[tuple[int, ...]]:
    return [tuple(weight.shape) for weight in weights]


def _difference(weights: Sequence[Any], source: Sequence[Any]) -> str:
    """Describes the first of the network's weights, the head last, that differs from the saved model."""
    for weight, given in zip(weights, source, strict=False):
        if tuple(weight.shape) != tuple(given.shape):
            return f"{weight.path} is {tuple(weight.shape)}, the file has {tuple(given.shape)}"
    return f"the network has {len(weights)} weights, the file has {len(source)}"
