"""The networks: a backbone with frozen batch-norm statistics and a new head, or the user's Keras model.

Every network takes uint8 or float images [batch, size, size, 3] in 0…255 and returns logits [batch, classes]:

    preprocessing -> backbone -> (global average pooling) -> dropout 0.2 -> dense "head"
    custom model (from a .keras file, or made by a function in a .py file)

Batch-norm statistics are frozen in every scheme (as in the paper; `elastic_trainer.networks.batch_norm`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import keras

from elastic_trainer.networks import pretrained
from elastic_trainer.networks.architectures import build_backbone, preprocess
from elastic_trainer.networks.batch_norm import freeze_batch_norm
from elastic_trainer.networks.custom_model import build_custom_model
from elastic_trainer.networks.tensors import HEAD
from elastic_trainer.runs.reader import trained_classes
from elastic_trainer.settings import Settings
from elastic_trainer.settings.network_names import is_custom_model

DROPOUT = 0.2


def build_model(
    name: str,
    input_size: int,
    num_classes: int,
    weights: str = "none",
    alpha: float = 1.0,
    seed: int = 0,
    classes: pretrained.Classes | None = None,
) -> keras.Model:
    """A network for fine-tuning, with a new head.

    Args:
        name: a network we know (see `build_backbone`), a .keras file, or file.py:function (see `build_custom_model`).
        input_size: height and width in pixels.
        num_classes: number of logits.
        weights: "imagenet", "none", or a path (see `pretrained.load`).
        alpha: width of a MobileNet; the others have none.
        seed: of dropout; new weights follow Keras' global seed.
        classes: of this network and of the model in `weights`, where their names are known.

    Raises:
        UserError: the size does not suit the network, or the weights are not available or do not fit.
    """
    if is_custom_model(name):
        model, as_given = build_custom_model(name, input_size, num_classes)
        if weights != "none":
            pretrained.load(model, as_given, Path(weights), name, classes)
        return model
    inputs = keras.Input((input_size, input_size, 3), name="image")
    backbone = freeze_batch_norm(build_backbone(name, input_size, weights, alpha))
    x = backbone(preprocess(name, inputs))
    if len(x.shape) == 4:
        x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    x = keras.layers.Dropout(DROPOUT, seed=seed + 2, name="dropout")(x)
    outputs = keras.layers.Dense(num_classes, name=HEAD, dtype="float32")(x)
    model = keras.Model(inputs, outputs, name=f"{name}_classifier")
    if weights not in ("imagenet", "none"):
        pretrained.load(model, backbone, Path(weights), name, classes)
    return model


def build(settings: Settings, class_names: Sequence[str] | None = None) -> keras.Model:
    """The network of these settings, whose number of classes is known. Sets Keras' seed and precision (float32).

    A head in `settings.weights` is kept for the `class_names`, in the order of the outputs, that it knows; without
    names, for the same number of classes.
    """
    assert settings.num_classes is not None, "the data set gives the number of classes"
    keras.utils.set_random_seed(settings.seed)
    keras.config.set_dtype_policy("float32")
    before = trained_classes(Path(settings.weights))
    return build_model(
        settings.model_name,
        settings.input_size,
        settings.num_classes,
        settings.weights,
        settings.alpha,
        settings.seed,
        ([*class_names], before) if class_names and before else None,
    )
