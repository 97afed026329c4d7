"""Loads the model that `--evaluate` names, and its data set, and checks that the two fit.

The model comes from a .keras file. If Keras cannot load its layers without their code, `--model_name` builds the
network and the file only supplies the weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import keras

import data
import models
import utils
from elastic_trainer.datasets.image_data import ImageData
from elastic_trainer.datasets.sources import count_classes
from elastic_trainer.networks import pretrained
from elastic_trainer.networks.own_model import with_logits
from elastic_trainer.networks.saved_model import load_model
from elastic_trainer.settings import DIGITS, PAPER
from utils import UserError

if TYPE_CHECKING:
    import argparse


def load(args: argparse.Namespace) -> tuple[keras.Model, ImageData]:
    """The model that `--evaluate` names, and the data set to evaluate it on.

    Returns:
        A model from images [batch, size, size, 3] in 0…255 to logits [batch, outputs], and the data at that size.

    Raises:
        UserError: the file holds no model, or the model does not fit the data set or the options.
    """
    classes = count_classes(args.dataset_name, args.data_dir)
    defaults = DIGITS if args.dataset_name == "digits" else PAPER
    if args.model_name is not None:
        size = args.input_size or defaults["input_size"]
        model = models.build_model(args.model_name, size, args.num_classes or classes, augment=args.augment)
        pretrained.load_saved(model, args.evaluate, "--evaluate", f"the network of --model_name {args.model_name}")
    else:
        model = load_model(args.evaluate, "--evaluate")
        size = _input_size(model, args.input_size, args.evaluate) or defaults["input_size"]
    model = _with_logits_for(model, size, args.evaluate, args.dataset_name, classes, args.num_classes)
    return model, data.from_options(args, size)


def _input_size(model: keras.Model, requested: int | None, path: Path) -> int | None:
    """Height and width of the images that `model` takes; `requested` (which may be None) if it takes any size.

    Raises:
        UserError: the model takes no square RGB images, or not images of the requested size.
    """
    try:
        shape = model.input_shape
    except AttributeError:  # a subclass of keras.Model without a defined input shape
        return requested
    if not isinstance(shape, tuple) or len(shape) != 4 or shape[3] not in (3, None):
        raise UserError(f"--evaluate {path}: takes {shape}, not RGB images [batch, height, width, 3]")
    sizes = {size for size in shape[1:3] if size is not None}
    if len(sizes) > 1:
        raise UserError(f"--evaluate {path}: takes images of {shape[1]}×{shape[2]}, but only square ones are supported")
    if requested is not None and sizes - {requested}:
        raise UserError(
            f"--input_size {requested}: {path} takes images of {sizes.pop()} pixels; give that or leave out "
            "--input_size"
        )
    return next(iter(sizes), requested)


def _with_logits_for(
    model: keras.Model, size: int, path: Path, dataset_name: str, classes: int, num_classes: int | None
) -> keras.Model:
    """`model` for images of one size, returning logits.

    Args:
        model: a classifier, with or without a softmax at its end.
        size: height and width of the images.
        path: of the model, for error messages.
        dataset_name, classes: the data set and its number of classes.
        num_classes: the number of outputs that `--num_classes` asks for, or None.

    Raises:
        UserError: the model does not take such images, or its number of outputs does not fit the number of classes.
    """
    inputs = keras.Input((size, size, 3), name="image")
    try:
        shape: tuple[int | None, ...] = getattr(model(inputs), "shape", ())
        outputs = shape[1] if len(shape) == 2 else None
        logits = None if outputs is None else with_logits(model, outputs, str(path))(inputs)
    except Exception as error:  # a custom layer may raise anything
        raise UserError(
            f"--evaluate {path}: does not take images of {size}×{size} ({utils.first_line(error)}); see --input_size"
        ) from error
    if outputs is None:
        raise UserError(f"--evaluate {path}: returns {shape or 'several outputs'}, not one number per class")
    if outputs != (num_classes or classes) or outputs < classes:
        wrong = num_classes if num_classes and num_classes != outputs else None
        flag = f"--num_classes {wrong}" if wrong else f"--dataset_name {dataset_name}"
        hint = f"; give --num_classes {outputs} if it has more outputs on purpose" if outputs > classes else ""
        raise UserError(
            f"{flag}: {path} has outputs for {outputs} classes, {dataset_name} has {classes}; "
            f"name the data set it was trained on{hint}"
        )
    return keras.Model(inputs, logits, name=model.name)
