"""Builds the backbone of each network that has a name, and scales images the way its pre-training did.

The paper trains ResNet50, VGG16, MobileNetV2 and ViT-B/16. ViT comes from vit-keras, EfficientNet-Lite0
from here, all others from keras.applications, so every network of Keras can be named.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import keras
import numpy as np

from elastic_trainer.networks.efficientnet_lite import OFFSET, SCALE, efficientnet_lite
from elastic_trainer.settings.network_names import KERAS_NETWORKS, PACKAGED_NETWORK, WIDTHS
from elastic_trainer.system.errors import UserError, first_line, importing

SMALLEST_SIZE = 32  # of the input; Keras requires more for some networks
_PLUS_MINUS_ONE = (False, [1 / 127.5] * 3, [-1.0] * 3)  # ViT: 0…255 to -1…1, as `_scaling` returns it


class Architecture(NamedTuple):
    """How one backbone is built."""

    build: Callable[[int, float, str | None], keras.Model]  # of input size, alpha, and "imagenet" or None
    preprocess: Callable[[keras.KerasTensor], keras.KerasTensor]  # of images in 0…255, as in pre-training
    size_step: int = 1  # the input size must be a multiple of this
    pool: bool = True  # whether it returns a feature map, which needs global average pooling


def architecture(name: str) -> Architecture:
    """The architecture called `name`, as `network_names.known_network` takes it, in lower case."""
    if name == "vit":
        return Architecture(_build_vit, partial(_preprocess, *_PLUS_MINUS_ONE), size_step=16, pool=False)
    if name == PACKAGED_NETWORK:
        preprocess = partial(_preprocess, False, [SCALE] * 3, [OFFSET] * 3)
        return Architecture(lambda size, alpha, weights: efficientnet_lite(size, weights), preprocess)
    keras_name = next(keras_name for keras_name in KERAS_NETWORKS if keras_name.lower() == name)
    function = getattr(keras.applications, keras_name)
    module = sys.modules[function.__module__]

    def build(size: int, alpha: float, weights: str | None) -> keras.Model:
        width = {"alpha": alpha} if name in WIDTHS else {}
        return function(input_shape=(size, size, 3), include_top=False, weights=weights, **width)

    return Architecture(build, partial(_preprocess, *_scaling(module.preprocess_input)))


def _scaling(preprocess_input: Callable[[np.ndarray], np.ndarray]) -> tuple[bool, list[float], list[float]]:
    """Whether a `preprocess_input` function of Keras reverses the channels, and its scale and offset of each.

    Keras' function can be neither saved nor traced as a layer. Its scale and offset are therefore found from its
    results for a black and a white image, and a layer with the same effect is built from them.
    """
    floatx = keras.config.floatx()
    keras.config.set_floatx("float64")
    try:
        offset, white = preprocess_input(np.array([[[[0.0] * 3]], [[[255.0] * 3]]]))[:, 0, 0]
        sample = np.random.default_rng(0).uniform(0, 255, (1, 2, 2, 3))
        expected = preprocess_input(sample.copy())
    finally:
        keras.config.set_floatx(floatx)
    scale = ((white - offset) / 255).round(12)
    for reverse in (False, True):
        if np.allclose((sample[..., ::-1] if reverse else sample) * scale + offset, expected, atol=1e-6):
            return reverse, scale.tolist(), offset.tolist()
    raise NotImplementedError(f"{preprocess_input.__module__}.preprocess_input does more than scale channels")


def _preprocess(reverse: bool, scale: list[float], offset: list[float], images: keras.KerasTensor) -> keras.KerasTensor:
    if reverse:
        images = keras.ops.flip(images, axis=-1)
    if scale == [1.0] * 3 and offset == [0.0] * 3:  # the backbone has a layer for it
        return images
    common = [values[0] if len(set(values)) == 1 else values for values in (scale, offset)]
    return keras.layers.Rescaling(*common)(images)


def _build_vit(size: int, alpha: float, weights: str | None) -> keras.Model:
    with importing("--model_name vit"):
        from vit_keras import vit

    network = vit.vit_b16(image_size=size, pretrained=weights == "imagenet", include_top=False, pretrained_top=False)
    # vit-keras takes the class token with a Lambda layer, which Keras 3 refuses to load; slicing has the same result.
    return keras.Model(network.inputs, network.get_layer("Transformer_encoder_norm").output[:, 0], name="vit_b16")


def build_backbone(name: str, size: int, weights: str, alpha: float) -> keras.Model:
    """Build the backbone of a network that has a name; `weights`: "imagenet", or anything else for random weights.

    Raises `UserError` if the size is too small or not a multiple of the patch size, or if there are no ImageNet weights
    for this width, or they cannot be downloaded. The message says which file to download by hand.
    """
    parts = architecture(name)
    if size < SMALLEST_SIZE or size % parts.size_step:
        rule = f"a multiple of {parts.size_step} and " if parts.size_step > 1 else ""
        raise UserError(f"--input_size {size}: {name} needs {rule}at least {SMALLEST_SIZE}")
    if weights != "imagenet":
        try:
            return parts.build(size, alpha, None)
        except ValueError as error:  # smaller than Keras allows
            raise UserError(f"--input_size {size}: {name} cannot be built at this size: {first_line(error)}") from error
    try:
        return parts.build(size, alpha, "imagenet")
    except UserError:
        raise
    except ValueError as error:  # a width for which no weights exist
        raise UserError(f"--weights imagenet: {name} at --alpha {alpha:g}: {first_line(error)}") from error
    except Exception as error:  # Keras raises a bare Exception when its download fails
        url = re.search(r"https?://\S+\.(?:h5|npz)", str(error))
        then = "put it into ~/.keras/weights" if name == "vit" else "give --weights FILE"
        raise UserError(
            f"--weights imagenet: the weights of {name} cannot be downloaded; without a network, fetch "
            f"{url[0] if url else 'them'} on a machine that has one, and {then}; or give --weights none, or "
            f"--model_name {PACKAGED_NETWORK}, whose weights are a package"
        ) from error
