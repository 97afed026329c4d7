"""Loads the model and the data set of `main.py --evaluate`, and checks that they suit each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import keras

from elastic_trainer.datasets.image_data import ImageData, leave_out_trained, trained_images
from elastic_trainer.datasets.sources import find_to_test
from elastic_trainer.errors import UserError, first_line
from elastic_trainer.networks.logits import with_logits
from elastic_trainer.networks.pretrained import load_saved
from elastic_trainer.networks.saved_model import load_model
from elastic_trainer.runs.config import changed_class, check_network, network_record
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

    Raises:
        UserError: the file contains no model, or the model does not suit the data set or the options.
    """
    images = command.data
    source = find_to_test(images, command.class_names, trained_images(command.model))
    _check_class_names(command, source.class_names)
    classes = len(source.class_names)
    default_size = defaults_of(images.dataset_name)["input_size"]
    model = saved_network(command.model, command.model_name)
    if model is not None:
        size = fixed_input_size(model, command.input_size, command.model) or default_size
    else:
        name, size = str(command.model_name), command.input_size or default_size
        build_it = partial(build, name, size, command.num_classes or classes)
        model = network_of_source(command.model, name, build_it, command.seed, command.trained_network)
    model = with_checked_outputs(model, size, command.model, images.dataset_name, classes, command.num_classes)
    dataset = load(images, size, command.batch_size, command.seed, command.num_classes, source=source)
    leave_out_trained(dataset, command.model, "--evaluate")
    return model, dataset


def _check_class_names(command: EvaluateCommand, names: Sequence[str]) -> None:
    """Raise `UserError` if the model to evaluate was trained on classes with other names."""
    change = changed_class(names, command.class_names or names)
    if change is not None:
        raise UserError(
            f"--evaluate {command.model}: was trained with {change}; give images of the same classes, in folders with "
            "the same names"
        )


def saved_network(path: Path, name: str | None) -> keras.Model | None:
    """The model in `path`; None if it is to be made by the function `name` of the user, as Keras cannot load it.

    Raises:
        UserError: there is no such function, and Keras cannot load it.
    """
    try:
        return load_model(path, "--evaluate", imports=name is None)
    except UserError:
        if name is None:
            raise
        return None


def network_of_source(
    path: Path, name: str, build: Callable[[], keras.Model], seed: int, record: dict[str, str] | None
) -> keras.Model:
    """The model whose weights are in `path`, made by code of the user.

    Args:
        path: the .keras file.
        name: FILE.py:FUNCTION.
        build: makes the network by it.
        seed: that it was trained with.
        record: of the network that was trained, see `network_record`.

    Raises:
        UserError: the weights are of another network, or it computes something else than when it was trained.
    """
    keras.utils.set_random_seed(seed)
    keras.config.set_dtype_policy(record["precision"] if record else "float32")
    try:
        model = build()
        load_saved(model, path, "--evaluate", f"the network of --model_name {name}")
        check_network(network_record(model), record, f"--evaluate {path}: {name}", ["inference"])
    finally:
        keras.config.set_dtype_policy("float32")
    return model


def fixed_input_size(model: keras.Model, requested: int | None, path: Path) -> int | None:
    """Height and width of the images that `model` takes; `requested` (which may be None) if it takes any size.

    Raises:
        UserError: the model takes no square RGB images, or not images of the requested size.
    """
    shape = getattr(model, "input_shape", None)
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


def with_checked_outputs(
    model: keras.Model, size: int, path: Path, dataset_name: str, classes: int, num_classes: int | None
) -> keras.Model:
    """`model` for images of one size, returning logits.

    Args:
        model: a classifier, with or without a softmax at its end.
        size: height and width of the images.
        path: of the model, for error messages.
        dataset_name, classes: the data set and its number of classes.
        num_classes: the value of `--num_classes`, or None.

    Raises:
        UserError: the model does not take such images, or its number of outputs does not fit the number of classes.
    """
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
