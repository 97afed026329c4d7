"""Loads the model and the data set of `main.py --evaluate`, and checks that they suit each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import keras

from elastic_trainer.datasets.image_data import ImageData, leave_out_trained, trained_images
from elastic_trainer.datasets.named import DATASETS, changed_class, find_to_test
from elastic_trainer.networks.custom_model import as_classifier
from elastic_trainer.networks.pretrained import load_saved
from elastic_trainer.networks.saved_model import load_model
from elastic_trainer.settings import PRESETS, Settings
from elastic_trainer.settings.network_names import USUAL_SIZE
from elastic_trainer.system.errors import UserError


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
    size = size or PRESETS[DATASETS[settings.dataset_name].preset].input_size or USUAL_SIZE
    try:
        model = load_model(path, "--evaluate")
    except UserError:  # Keras may need the code of custom layers
        if ".py:" not in settings.model_name:
            raise
        keras.utils.set_random_seed(settings.seed)
        model = build(settings.model_name, size, classes)
        load_saved(model, path, "--evaluate", f"the network of --model_name {settings.model_name}")
    takes = getattr(model, "input_shape", None)  # no subclass of keras.Model has it
    if settings.input_size is None and isinstance(takes, tuple) and len(takes) == 4:
        size = takes[1] or size
    model = as_classifier(model, size, classes, "--evaluate", str(path), keeps_classes=True)
    settings = replace(settings, input_size=size, num_classes=classes, batch_size=1)  # nothing trains
    dataset = load(settings, source=source)
    leave_out_trained(dataset, path, "--evaluate")
    return model, dataset
