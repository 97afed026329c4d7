"""Loads the model and the data set of `main.py --evaluate`, and checks that they suit each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import keras

from elastic_trainer.datasets.image_data import ImageData, leave_out_trained, trained_images
from elastic_trainer.datasets.named import DATASETS, changed_class, find_to_test
from elastic_trainer.networks.logits import with_logits
from elastic_trainer.networks.pretrained import load_saved
from elastic_trainer.networks.saved_model import load_model
from elastic_trainer.settings import PRESETS, Settings
from elastic_trainer.system.errors import UserError, first_line


def load_to_evaluate(
    settings: Settings,
    path: Path,
    class_names: Sequence[str] | None,
    build: Callable[[str, int, int], keras.Model],
    load: Callable[..., ImageData],
) -> tuple[keras.Model, ImageData]:
    """The model to evaluate, from images [batch, size, size, 3] in 0…255 to logits, and the data set at that size.

    Args:
        settings: of the evaluation; `model_name` is the user's function that builds the network, if there is one.
        path: the .keras file.
        class_names: that the model was trained on, in the order of its outputs, if they are known.
        build: makes a network of the user by its name, input size and number of classes, see `models.build_model`.
        load: reads images, see `data.load`.
    """
    source = find_to_test(settings, class_names, bool(len(trained_images(path))))
    change = changed_class(source.class_names, class_names or source.class_names)
    if change is not None:
        raise UserError(
            f"--evaluate {path}: was trained with {change}; give images of the same classes, in folders with the same "
            "names"
        )
    classes, size = len(source.class_names), settings.input_size
    size = size or PRESETS[DATASETS[settings.dataset_name].preset].input_size
    try:
        model = load_model(path, "--evaluate")
    except UserError:  # Keras may need the code of custom layers
        if ".py:" not in settings.model_name:
            raise
        keras.utils.set_random_seed(settings.seed)
        model = build(settings.model_name, size, classes)
        load_saved(model, path, "--evaluate", f"the network of --model_name {settings.model_name}")
    size = _fixed_input_size(model, path, settings.input_size) or size
    model = _with_checked_outputs(model, path, size, classes, settings.dataset_name)
    settings = replace(settings, input_size=size, num_classes=classes, batch_size=1)  # nothing trains
    dataset = load(settings, source=source)
    leave_out_trained(dataset, path, "--evaluate")
    return model, dataset


def _fixed_input_size(model: keras.Model, path: Path, requested: int | None) -> int | None:
    """Height and width of the images that `model` takes, which must be square; None if it takes any size."""
    shape = getattr(model, "input_shape", None)
    if shape is None:  # a subclass of keras.Model without a defined input shape
        return None
    is_image = isinstance(shape, tuple) and len(shape) == 4 and shape[3] in (3, None)
    sizes = {size for size in shape[1:3] if size is not None} if is_image else set()
    if not is_image or len(sizes) > 1:
        raise UserError(f"--evaluate {path}: takes {shape}, not square RGB images [batch, size, size, 3]")
    if requested is not None and sizes - {requested}:
        takes = f"{path} takes images of {sizes.pop()} pixels"
        raise UserError(f"--input_size {requested}: {takes}; give that, or leave it out")
    return next(iter(sizes), None)


def _with_checked_outputs(model: keras.Model, path: Path, size: int, classes: int, dataset_name: str) -> keras.Model:
    """A classifier, with or without a softmax at its end, for images of one size, returning logits.

    It must have an output for each of the data set's `classes`.
    """
    inputs = keras.Input((size, size, 3), name="image")
    try:
        shape = tuple(getattr(model(inputs), "shape", ()))
        fits = shape == (None, classes)
        logits = with_logits(model, inputs.shape[1:], classes, str(path))(inputs) if fits else None
    except Exception as error:  # a custom layer may raise anything
        raise UserError(
            f"--evaluate {path}: does not take images of {size}×{size} ({first_line(error)}); see --input_size"
        ) from error
    if not fits:
        raise UserError(
            f"--evaluate {path}: returns {shape or 'several outputs'}, not one number for each of the {classes} "
            f"classes of {dataset_name}; name the data set it was trained on"
        )
    return keras.Model(inputs, logits, name=model.name)
