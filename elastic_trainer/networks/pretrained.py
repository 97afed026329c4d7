"""Loads the weights that training starts from (`--weights`): ImageNet's, a file, or the model of an earlier run.

The paper starts from ImageNet weights. A file that does not fit, or is damaged, is refused: Keras would
silently keep random weights for some layers.
"""

from __future__ import annotations

import warnings
import zipfile
from contextlib import ExitStack
from itertools import compress
from pathlib import Path
from typing import Any

import keras
import numpy as np

from elastic_trainer.networks.saved_model import check_finite, load_model
from elastic_trainer.networks.tensors import head_mask
from elastic_trainer.settings import BEST_MODEL
from elastic_trainer.settings.network_names import is_custom_model
from elastic_trainer.system.errors import UserError, first_few
from elastic_trainer.system.files import check_unpacked

Classes = tuple[list[str], list[str]]  # of a network and of the weights of its head, in the order of their outputs


def load(model: keras.Model, backbone: keras.Model, path: Path, name: str, classes: Classes | None = None) -> None:
    """Load the weights in `path` into `model`, or into its `backbone` if the file has no top layers.

    Args:
        model: a classifier.
        backbone: the part of `model` without the head; of a custom model the user's model, head included.
        path: .h5 or .weights.h5 of the backbone, a .keras file, or the folder of a run. The last two also supply the
            head (see `_from_model`).
        name: of the network, for the error if the file is missing, damaged, or belongs to another network.
        classes: names of those of the network and of the model in `path`; None if either are unknown.
    """
    if path.is_dir():
        path /= BEST_MODEL
        if not path.is_file():
            raise UserError(f"--weights {path.parent}: has no best.keras; a run saves it with --save_model or --export")
    if path.suffix == ".keras":
        _from_model(model, path, name, classes)
    elif path.suffix == ".h5":
        load_saved(backbone, path, "--weights", name if is_custom_model(name) else f"{name} without its top layers")
    else:
        raise UserError(
            f"--weights {path}: must be .h5, .weights.h5, .keras, or the folder of a run that saved its model"
        )


def load_saved(model: keras.Model, path: Path, flag: str, name: str) -> None:
    """Load all weights in an .h5, .weights.h5 or .keras file into all layers of `model`.

    Raises `UserError`, with the flag and the network's name, if the file is damaged, if a layer has other weights or
    none in it (which Keras skips with a warning), or if it has weights for no layer here (which Keras ignores).
    """
    try:
        arrays = _count_arrays(path)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Skipping")
            model.load_weights(path)
        if arrays > len(model.weights):
            raise ValueError(f"it has {arrays} arrays, the network has {len(model.weights)}")
    except Exception as error:  # h5py and Keras raise many types for a file that is damaged or does not fit
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{flag} {path}: is damaged or does not fit {name}: {reason}") from error
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


def _from_model(model: keras.Model, path: Path, name: str, classes: Classes | None) -> None:
    """Load the weights of a saved model with the same layers, but possibly with other classes.

    The head gets what the saved one has for classes that both know, and keeps its new values for others; prints which.
    Without names of classes, a head of the same shape knows the same. Outputs are the last axis of its variables.
    """
    head_variables = compress(model.trainable_variables, head_mask(model))
    in_head, own = {id(variable) for variable in head_variables}, model.weights
    head = [k for k, weight in enumerate(own) if id(weight) in in_head]
    new = [np.array(weight) for weight in own]
    try:
        source = load_model(path, "--weights").weights
    except UserError:
        if not is_custom_model(name):
            raise
        load_saved(model, path, "--weights", name)  # Keras cannot build custom layers, but can load their weights
        source = own
    values = [np.array(weight) for weight in source]
    inner, saved_inner = (
        [array.shape[:-1] if k in head else array.shape for k, array in enumerate(arrays)] for arrays in (new, values)
    )
    if inner != saved_inner:
        raise UserError(f"--weights {path}: does not fit {name}: its weights have other shapes")
    outputs, saved_outputs = ([arrays[k].shape[-1] for k in head] for arrays in (new, values))
    now, before = classes or ([], [])
    known, is_same = now, outputs == saved_outputs and now == before
    if not is_same:
        fits = {*outputs} == {len(now)} and {*saved_outputs} == {len(before)}
        known = [name for name in now if fits and name in before]
        for k in head:
            for name in known:
                new[k][..., now.index(name)] = values[k][..., before.index(name)]
            values[k] = new[k]
    for weight, array in zip(own, values, strict=True):
        weight.assign(array)
    if classes is not None or not is_same:
        kept = f"{len(known)} of {outputs[-1]} classes ({first_few(known) or 'none'})"
        print(f"--weights {path}: its head is kept for {kept}")
