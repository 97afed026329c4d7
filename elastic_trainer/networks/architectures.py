"""How each network that is known by name is built and what scaling its images need."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import keras
import numpy as np

import utils
from elastic_trainer.networks import pretrained
from elastic_trainer.networks.names import KERAS_NETWORKS, WIDTHS
from utils import UserError

SMALLEST_SIZE = 32  # of a known network's input; Keras asks for more in some


class Architecture(NamedTuple):
    """How one backbone is made.

    Attributes:
        build: (input_size, alpha, weights) -> backbone; `weights` is "imagenet" or None.
        preprocess: maps images in 0…255 to what the backbone was pre-trained on.
        size_step: the input size must be a multiple of this.
        pool: whether the backbone returns a feature map to be averaged.
    """

    build: Callable[[int, float, str | None], keras.Model]
    preprocess: Callable[[keras.KerasTensor], keras.KerasTensor]
    size_step: int = 1
    pool: bool = True


def architecture(name: str) -> Architecture:
    """The backbone called `name`, one of `options.MODEL_NAMES` or of `options.KERAS_NETWORKS` in small letters."""
    if name == "vit":
        return Architecture(_build_vit, partial(_preprocess, *_PLUS_MINUS_ONE), size_step=16, pool=False)
    keras_name = next(keras_name for keras_name in KERAS_NETWORKS if keras_name.lower() == name)
    function = getattr(keras.applications, keras_name)
    module = sys.modules[function.__module__]

    def build(size: int, alpha: float, weights: str | None) -> keras.Model:
        width = {"alpha": alpha} if name in WIDTHS else {}
        return function(input_shape=image_shape(size), include_top=False, weights=weights, **width)

    return Architecture(build, partial(_preprocess, *_scaling(module.preprocess_input)))


_PLUS_MINUS_ONE = (False, [1 / 127.5] * 3, [-1.0] * 3)


def _scaling(preprocess_input: Callable[[np.ndarray], np.ndarray]) -> tuple[bool, list[float], list[float]]:
    """What a `preprocess_input` of Keras does: (order of channels reversed?, scale, offset) of each channel.

    Keras' own function can be neither saved as a layer nor traced like one, so a layer that does the same is made from
    what becomes of a black and a white image.
    """
    usual = keras.config.floatx()
    keras.config.set_floatx("float64")
    try:
        offset, white = preprocess_input(np.array([[[[0.0] * 3]], [[[255.0] * 3]]]))[:, 0, 0]
        sample = np.random.default_rng(0).uniform(0, 255, (1, 2, 2, 3))
        wanted = preprocess_input(sample.copy())
    finally:
        keras.config.set_floatx(usual)
    scale = ((white - offset) / 255).round(12)
    for reverse in (False, True):
        if np.allclose((sample[..., ::-1] if reverse else sample) * scale + offset, wanted, atol=1e-6):
            return reverse, scale.tolist(), offset.tolist()
    raise NotImplementedError(f"{preprocess_input.__module__}.preprocess_input does more than scale channels")


def _preprocess(reverse: bool, scale: list[float], offset: list[float], images: keras.KerasTensor) -> keras.KerasTensor:
    if reverse:
        images = keras.ops.flip(images, axis=-1)
    if scale == [1.0] * 3 and offset == [0.0] * 3:  # the backbone does it
        return images
    common = [values[0] if len(set(values)) == 1 else values for values in (scale, offset)]
    return keras.layers.Rescaling(*common)(images)


def image_shape(size: int) -> tuple[int, int, int]:
    return (size, size, 3)


def _build_vit(size: int, alpha: float, weights: str | None) -> keras.Model:
    from vit_keras import vit

    network = vit.vit_b16(image_size=size, pretrained=weights == "imagenet", include_top=False, pretrained_top=False)
    # vit-keras takes the class token by a Lambda layer, which Keras 3 refuses to load again; slicing does the same.
    return keras.Model(network.inputs, network.get_layer("Transformer_encoder_norm").output[:, 0], name="vit_b16")


def build_backbone(name: str, size: int, weights: str, alpha: float) -> keras.Model:
    parts = architecture(name)
    if size < SMALLEST_SIZE or size % parts.size_step:
        rule = f"a multiple of {parts.size_step} and " if parts.size_step > 1 else ""
        raise UserError(f"--input_size {size}: {name} needs {rule}at least {SMALLEST_SIZE}")
    try:
        if weights == "imagenet":
            return pretrained.with_imagenet_weights(partial(parts.build, size, alpha), name, alpha)
        return parts.build(size, alpha, None)
    except ValueError as error:  # Keras' own smallest size
        raise UserError(f"--input_size {size}: {name} cannot be built so: {utils.first_line(error)}") from error
