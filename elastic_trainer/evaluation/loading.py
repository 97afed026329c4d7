"""Loads the model and the data set of `main.py --evaluate`, and checks that they suit each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import keras

from elastic_trainer.datasets.image_data import ImageData, leave_out_trained, trained_images
from elastic_trainer.datasets.named import DATASETS, find_to_test
from elastic_trainer.networks.logits import with_logits
from elastic_trainer.networks.pretrained import load_saved
from elastic_trainer.networks.saved_model import load_model
from elastic_trainer.runs.reader import changed_class
from elastic_trainer.settings import PRESETS, Evaluation
from elastic_trainer.system.errors import UserError, first_line


def load_to_evaluate(
    evaluation: Evaluation, build: Callable[[str, int, int], keras.Model], load: Callable[..., ImageData]
) -> tuple[keras.Model, ImageData]:
    """The model to evaluate, from images [batch, size, size, 3] in 0…255 to logits, and the data set at that size.

    Args:
        evaluation: its settings.
        build: makes a network of the user by its name, input size and number of classes, see `models.build_model`.
        load: reads images, see `data.load`.
    """
    settings = evaluation.settings
    source = find_to_test(settings, evaluation.class_names, bool(len(trained_images(evaluation.model))))
    change = changed_class(source.class_names, evaluation.class_names or source.class_names)
    if change is not None:
        raise UserError(
            f"--evaluate {evaluation.model}: was trained with {change}; give images of the same classes, in folders "
            "with the same names"
        )
    classes, default_size = len(source.class_names), PRESETS[DATASETS[settings.dataset_name].preset].input_size
    model = _saved_network(evaluation)
    if model is not None:
        size = _fixed_input_size(model, evaluation) or default_size
    else:
        size = settings.input_size or default_size
        model = _built_network(evaluation, partial(build, str(evaluation.network), size, classes))
    model = _with_checked_outputs(model, size, evaluation, classes)
    dataset = load(replace(settings, input_size=size, num_classes=classes), source=source)
    leave_out_trained(dataset, evaluation.model, "--evaluate")
    return model, dataset


def _saved_network(evaluation: Evaluation) -> keras.Model | None:
    """The model in the file; None if Keras cannot load it, and a function of the user makes it."""
    try:
        return load_model(evaluation.model, "--evaluate")
    except UserError:
        if evaluation.network is None:
            raise
        return None


def _built_network(evaluation: Evaluation, build: Callable[[], keras.Model]) -> keras.Model:
    """The network that code of the user makes, with the weights in the file."""
    keras.utils.set_random_seed(evaluation.settings.seed)
    model = build()
    load_saved(model, evaluation.model, "--evaluate", f"the network of --model_name {evaluation.network}")
    return model


def _fixed_input_size(model: keras.Model, evaluation: Evaluation) -> int | None:
    """Height and width of the images that `model` takes, which must be square; `--input_size` if it takes any size."""
    shape, path = getattr(model, "input_shape", None), evaluation.model
    requested: int | None = evaluation.settings.input_size
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


def _with_checked_outputs(model: keras.Model, size: int, evaluation: Evaluation, classes: int) -> keras.Model:
    """A classifier, with or without a softmax at its end, for images of one size, returning logits.

    It must have an output for each of the data set's `classes`.
    """
    path, dataset_name = evaluation.model, evaluation.settings.dataset_name
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
    if outputs != classes:
        raise UserError(
            f"--dataset_name {dataset_name}: {path} has outputs for {outputs} classes, {dataset_name} has {classes}; "
            "name the data set it was trained on"
        )
    return keras.Model(inputs, logits, name=model.name)
