"""Builds the backbone of each network that has a name, and scales images the way its pre-training did.

The paper trains ResNet50, VGG16, MobileNetV2 and ViT-B/16. ViT comes from vit-keras, EfficientNet-Lite0
from here, all others from keras.applications, so every network of Keras can be named.
"""

from __future__ import annotations

from typing import Any

import keras

from elastic_trainer.networks.efficientnet_lite import OFFSET, SCALE, efficientnet_lite
from elastic_trainer.settings.network_names import KERAS_NETWORKS, PACKAGED_NETWORK, WIDTHS
from elastic_trainer.system.errors import UserError, first_line, importing

# Whether the channels of images in 0…255 are reversed, and the scale and offset of all or of each. Keras' functions for
# that cannot be saved as layers.
_PLUS_MINUS_ONE = (False, 1 / 127.5, -1.0)
_CAFFE = (True, 1.0, [-103.939, -116.779, -123.68])
_DEVIATIONS = (0.229, 0.224, 0.225)
_TORCH = (
    False,
    [1 / 255 / deviation for deviation in _DEVIATIONS],
    [-mean / deviation for mean, deviation in zip((0.485, 0.456, 0.406), _DEVIATIONS, strict=True)],
)
_SCALINGS: dict[str, tuple[bool, Any, Any]] = {  # by name, or module of keras.applications; others have a layer for it
    **dict.fromkeys(("vit", "mobilenet", "mobilenet_v2", "inception_v3", "inception_resnet_v2"), _PLUS_MINUS_ONE),
    **dict.fromkeys(("nasnet", "resnet_v2", "xception"), _PLUS_MINUS_ONE),
    **dict.fromkeys(("resnet", "vgg16", "vgg19"), _CAFFE),
    "densenet": _TORCH,
    PACKAGED_NETWORK: (False, SCALE, OFFSET),
}


def preprocess(name: str, images: keras.KerasTensor) -> keras.KerasTensor:
    """Images in 0…255, scaled as in the pre-training of the network `name`, by layers that can be saved."""
    family = _keras_function(name).__module__.rpartition(".")[2] if name in KERAS_NETWORKS else name
    if family not in _SCALINGS:
        return images
    reverse, scale, offset = _SCALINGS[family]
    if reverse:
        images = keras.ops.flip(images, axis=-1)
    return keras.layers.Rescaling(scale, offset)(images)


def build_backbone(name: str, size: int, weights: str, alpha: float) -> keras.Model:
    """Build the backbone of a network that has a name, as `network_names.known_network` returns it.

    It returns a feature map or, of "vit", features. `weights`: "imagenet", or anything else for random weights.

    Raises `UserError` if the size does not suit the network, or if there are no ImageNet weights for this width, or
    they cannot be downloaded. The message says which file to download by hand.
    """
    try:
        return _build(name, size, weights if weights == "imagenet" else None, alpha)
    except UserError:
        raise
    except (ValueError, AssertionError) as error:
        flags = f"--input_size {size}, --alpha {alpha:g} and --weights {weights}"
        raise UserError(f"--model_name {name}: cannot be built with {flags}: {first_line(error)}") from error
    except Exception as error:  # Keras raises a bare Exception when its download fails
        raise UserError(
            f"--weights imagenet: {first_line(error)}; fetch the file on a machine that has a network, and give it as "
            "--weights FILE (put that of vit into ~/.keras/weights); or give --weights none, or "
            f"--model_name {PACKAGED_NETWORK}, whose weights are a package"
        ) from error


def _build(name: str, size: int, weights: str | None, alpha: float) -> keras.Model:
    if name == PACKAGED_NETWORK:
        return efficientnet_lite(size, weights)
    if name in KERAS_NETWORKS:
        width = {"alpha": alpha} if name in WIDTHS else {}
        return _keras_function(name)(input_shape=(size, size, 3), include_top=False, weights=weights, **width)
    with importing("--model_name vit"):
        from vit_keras import vit

    network = vit.vit_b16(image_size=size, pretrained=weights == "imagenet", include_top=False, pretrained_top=False)
    # vit-keras takes the class token with a Lambda layer, which Keras 3 refuses to load; slicing has the same result.
    return keras.Model(network.inputs, network.get_layer("Transformer_encoder_norm").output[:, 0], name="vit_b16")


def _keras_function(name: str) -> Any:
    return getattr(keras.applications, KERAS_NETWORKS[name])
