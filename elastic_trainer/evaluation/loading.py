"""Loads the model and the data set of `main.py --evaluate`, and checks that they suit each other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import keras

from elastic_trainer.datasets.image_data import ImageData, leave_out_trained, trained_images
from elastic_trainer.datasets.sources import find_to_test
from elastic_trainer.errors import UserError, first_line
from elastic_trainer.networks.logits import with_logits
from elastic_trainer.networks.pretrained import load_saved
from elastic_trainer.networks.saved_model import load_model
from elastic_trainer.runs.config import changed_class
from elastic_trainer.settings import defaults_of

if TYPE_CHECKING:
    from elastic_trainer.cli.commands import EvaluateCommand


def load_to_evaluate(
    command: EvaluateCommand, build: Callable[[str, int, int], keras.Model], load: Callable[..., ImageData]
) -> tuple[keras.Model, ImageData]:
    """The model to evaluate, from images [batch, size, size, 3] in 0…255 to logits, and the data set at that size.

    Args:
        command: the evaluation.
        build: makes a network of the user by its name, input size and number of classes, see `models.build_model`.
        load: reads images, see `data.load`.
    """
    images = command.data
    source = find_to_test(images, command.class_names, trained_images(command.model))
    change = changed_class(source.class_names, command.class_names or source.class_names)
    if change is not None:
        raise UserError(
            f"--evaluate {command.model}: was trained with {change}; give images of the same classes, in folders with "
            "the same names"
        )
    classes, default_size = len(source.class_names), defaults_of(images.dataset_name)["input_size"]
    model = _saved_network(command)
    if model is not None:
        size = _fixed_input_size(model, command) or default_size
    else:
        size = command.input_size or default_size
        model = _built_network(command, partial(build, str(command.model_name), size, command.num_classes or classes))
    model = _with_checked_outputs(model, size, command, classes)
    dataset = load(images, size, command.batch_size, command.seed, command.num_classes, source=source)
    leave_out_trained(dataset, command.model, "--evaluate")
    return model, dataset


def _saved_network(command: EvaluateCommand) -> keras.Model | None:
    """The model in the file; None if Keras cannot load it, and a function of the user makes it."""
    try:
        return load_model(command.model, "--evaluate", imports=command.model_name is None)
    except UserError:
        if command.model_name is None:
            raise
        return None


def _built_network(command: EvaluateCommand, build: Callable[[], keras.Model]) -> keras.Model:
    """The network that code of the user makes, with the weights in the file."""
    keras.utils.set_random_seed(command.seed)
    model = build()
    load_saved(model, command.model, "--evaluate", f"the network of --model_name {command.model_name}")
    return model


def _fixed_input_size(model: keras.Model, command: EvaluateCommand) -> int | None:
    """Height and width of the images that `model` takes, which must be square; `--input_size` if it takes any size."""
    shape, requested, path = getattr(model, "input_shape", None), command.input_size, command.model
    if shape is None:  # a subclass of keras.Model without a defined input shape
        return requested
    if not isinstance(shape, tuple) or len(shape) != 4 or shape[3] not in (3, None):
        raise UserError(f"--evaluate {path}: takes {shape}, not RGB images [batch, height, width, 3]")
    sizes = {size for size in shape[1:3] if size is not None}
    if len(sizes) > 1:
        raise UserError(f"--evaluate {path}: takes images of {shape[1]}×{shape[2]}, but only square ones are supported")
    if requested is not None and sizes - {requested}:
        raise UserError(
            f"--input_size {requested}: {path} takes images of {sizes.pop()} pixels; give that, or leave it out"
        )
    return next(iter(sizes), requested)


def _with_checked_outputs(model: keras.Model, size: int, command: EvaluateCommand, classes: int) -> keras.Model:
    """A classifier, with or without a softmax at its end, for images of one size, returning logits.

    Its number of outputs must fit the data set's `classes` and `--num_classes`.
    """
    path, num_classes, dataset_name = command.model, command.num_classes, command.data.dataset_name
    inputs = keras.Input((size, size, 3), name="image")
    try:
        shape: tuple[int | None, ...] = getattr(model(inputs), "shape", ())
        outputs = shape[1] if len(shape) == 2 else None
        logits = None if outputs is None else with_logits(model, inputs.shape[1:], outputs, str(path))(inputs)
    except Exception as error:  # a custom layer may raise anything
        raise UserError(
            f"--evaluate {path}: does not take images of {size}×{size} ({first_line(error)}); see --input_size"
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
