"""Builds the backbone of each network that has a name, and scales images the way its pre-training did.

The paper trains ResNet50, VGG16, MobileNetV2 and ViT-B/16. ViT comes from vit-keras, EfficientNet-Lite0
from here, all others from keras.applications, so every network of Keras can be named.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import keras

from elastic_trainer.networks.efficientnet_lite import OFFSET, SCALE, efficientnet_lite
from elastic_trainer.settings.network_names import KERAS_NETWORKS, PACKAGED_NETWORK, WIDTHS
from elastic_trainer.system.errors import UserError, first_line, importing

SMALLEST_SIZE = 32  # of the input; Keras requires more for some networks

# Whether the channels of images in 0…255 are reversed, and the scale and offset of each. Keras' functions for that
# cannot be saved as layers.
_PLUS_MINUS_ONE = (False, [1 / 127.5] * 3, [-1.0] * 3)
_CAFFE = (True, [1.0] * 3, [-103.939, -116.779, -123.68])
_DEVIATIONS = (0.229, 0.224, 0.225)
_TORCH = (
    False,
    [1 / 255 / deviation for deviation in _DEVIATIONS],
    [-mean / deviation for mean, deviation in zip((0.485, 0.456, 0.406), _DEVIATIONS, strict=True)],
)
_SCALINGS = {  # by module of keras.applications; other backbones have a layer for it
    **dict.fromkeys(("mobilenet", "mobilenet_v2", "inception_v3", "inception_resnet_v2"), _PLUS_MINUS_ONE),
    **dict.fromkeys(("nasnet", "resnet_v2", "xception"), _PLUS_MINUS_ONE),
    **dict.fromkeys(("resnet", "vgg16", "vgg19"), _CAFFE),
    "densenet": _TORCH,
}


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
        scaled = partial(_preprocess, False, [SCALE] * 3, [OFFSET] * 3)
        return Architecture(lambda size, alpha, weights: efficientnet_lite(size, weights), scaled)
    keras_name = next(keras_name for keras_name in KERAS_NETWORKS if keras_name.lower() == name)
    function = getattr(keras.applications, keras_name)
    scaling = _SCALINGS.get(function.__module__.rpartition(".")[2])
    preprocess: Callable[..., Any] = partial(_preprocess, *scaling) if scaling else lambda images: images

    def build(size: int, alpha: float, weights: str | None) -> keras.Model:
        width = {"alpha": alpha} if name in WIDTHS else {}
        return function(input_shape=(size, size, 3), include_top=False, weights=weights, **width)

    return Architecture(build, preprocess)


def _preprocess(reverse: bool, scale: list[float], offset: list[float], images: keras.KerasTensor) -> keras.KerasTensor:
    if reverse:
        images = keras.ops.flip(images, axis=-1)
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
