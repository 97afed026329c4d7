"""The networks: a backbone with frozen batch-norm statistics, and a new head for the data set at hand.

Every network takes uint8 or float images [batch, size, size, 3] in 0…255 and returns logits [batch, classes]:

    augmentation -> preprocessing -> backbone -> (global average pooling) -> dropout 0.2 -> dense "head"

Batch-norm statistics are frozen in every scheme (paper, section 6). Keras 3 cannot be asked for that by
`training=False`: a backbone called so inside a functional model still normalises by the statistics of the batch when
the outer model is called with `training=True`. So the layers themselves are replaced.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from utils import UserError

DROPOUT = 0.2
HEAD = "head"


@keras.saving.register_keras_serializable(package="elastic_trainer")
class FrozenBatchNormalization(keras.layers.BatchNormalization):
    """Batch normalisation that always uses its moving statistics, and never changes them; gamma and beta train."""

    def call(self, inputs: tf.Tensor, training: bool | None = None, mask: tf.Tensor | None = None) -> tf.Tensor:
        """Normalise `inputs` [batch, height, width, channels] (other shapes too, by Keras' own slower way)."""
        channels_last = self.axis in (-1, len(inputs.shape) - 1)
        if len(inputs.shape) != 4 or not channels_last:
            return super().call(inputs, training=False, mask=mask)
        mean = tf.cast(self.moving_mean.value, tf.float32)
        variance = tf.cast(self.moving_variance.value, tf.float32)
        gamma = tf.cast(self.gamma.value, tf.float32) if self.scale else tf.ones_like(variance)
        beta = tf.cast(self.beta.value, tf.float32) if self.center else tf.zeros_like(mean)
        # One fused kernel forward and one backward, half the time of the chain of small operations Keras writes.
        return tf.raw_ops.FusedBatchNormV3(
            x=inputs, scale=gamma, offset=beta, mean=mean, variance=variance, epsilon=self.epsilon, is_training=False
        ).y


def freeze_batch_norm_statistics(model: keras.Model) -> keras.Model:
    """`model` with each BatchNormalization among its layers turned into a FrozenBatchNormalization of the same weights.

    Layers inside a model that is itself a layer of `model` are not reached.
    """
    if not any(isinstance(layer, keras.layers.BatchNormalization) for layer in model.layers):
        return model

    def replace(layer: keras.layers.Layer) -> keras.layers.Layer:
        if isinstance(layer, keras.layers.BatchNormalization) and not isinstance(layer, FrozenBatchNormalization):
            return FrozenBatchNormalization.from_config(layer.get_config())
        return layer.__class__.from_config(layer.get_config())

    clone = keras.models.clone_model(model, clone_function=replace)
    clone.set_weights(model.get_weights())
    return clone


class Architecture(NamedTuple):
    """How one backbone is made.

    Attributes:
        build: (input_size, alpha, weights) -> backbone with its own weights; `weights` is "imagenet" or None.
        preprocess: maps images in 0…255 to what the backbone was pre-trained on.
        size_step: the input size must be a multiple of this.
        pool: whether the backbone returns a feature map to be averaged.
    """

    build: Callable[[int, float, str | None], keras.Model]
    preprocess: Callable[[keras.KerasTensor], keras.KerasTensor]
    size_step: int = 1
    pool: bool = True


def _to_plus_minus_one(images: keras.KerasTensor) -> keras.KerasTensor:
    return keras.layers.Rescaling(1 / 127.5, offset=-1.0)(images)


def _to_centred_bgr(images: keras.KerasTensor) -> keras.KerasTensor:
    """Blue, green, red, less their means over ImageNet: how the Caffe weights of ResNet50 and VGG16 were trained."""
    return keras.layers.Rescaling(1.0, offset=[-103.939, -116.779, -123.68])(keras.ops.flip(images, axis=-1))


def _shape(size: int) -> tuple[int, int, int]:
    return (size, size, 3)


def _build_resnet50(size: int, alpha: float, weights: str | None) -> keras.Model:
    return keras.applications.ResNet50(input_shape=_shape(size), include_top=False, weights=weights)


def _build_vgg16(size: int, alpha: float, weights: str | None) -> keras.Model:
    return keras.applications.VGG16(input_shape=_shape(size), include_top=False, weights=weights)


def _build_mobilenetv2(size: int, alpha: float, weights: str | None) -> keras.Model:
    return keras.applications.MobileNetV2(input_shape=_shape(size), alpha=alpha, include_top=False, weights=weights)


def _build_vit(size: int, alpha: float, weights: str | None) -> keras.Model:
    from vit_keras import vit

    network = vit.vit_b16(image_size=size, pretrained=weights == "imagenet", include_top=False, pretrained_top=False)
    # vit-keras takes the class token by a Lambda layer, which Keras 3 refuses to load again; slicing does the same.
    return keras.Model(network.inputs, network.get_layer("Transformer_encoder_norm").output[:, 0], name="vit_b16")


ARCHITECTURES = {
    "resnet50": Architecture(_build_resnet50, _to_centred_bgr),
    "vgg16": Architecture(_build_vgg16, _to_centred_bgr),
    "mobilenetv2": Architecture(_build_mobilenetv2, _to_plus_minus_one),
    "vit": Architecture(_build_vit, _to_plus_minus_one, size_step=16, pool=False),
}


def _augmentation(kind: str, seed: int) -> list[keras.layers.Layer]:
    layers: list[keras.layers.Layer] = []
    if kind in ("flip", "flip_rotation"):
        layers.append(keras.layers.RandomFlip("horizontal", seed=seed))
    if kind == "flip_rotation":
        layers.append(keras.layers.RandomRotation(0.2, seed=seed + 1))
    return layers


def _build_backbone(name: str, size: int, weights: str, alpha: float) -> keras.Model:
    architecture = ARCHITECTURES[name]
    if size < 32 or size % architecture.size_step:
        rule = f"a multiple of {architecture.size_step} and " if architecture.size_step > 1 else ""
        raise UserError(f"--input_size {size}: {name} needs {rule}at least 32")
    if weights == "imagenet":
        try:
            return architecture.build(size, alpha, "imagenet")
        except ValueError as error:  # a width for which no weights exist
            raise UserError(f"--weights imagenet: {_first_line(error)}") from error
        except Exception as error:  # Keras raises a bare Exception when its download fails
            raise UserError(
                f"--weights imagenet: the weights of {name} cannot be downloaded ({_first_line(error)}); "
                "give --weights PATH with a file of them, or --weights none"
            ) from error
    backbone = architecture.build(size, alpha, None)
    if weights != "none":
        _load_weights(backbone, Path(weights), name)
    return backbone


def _load_weights(backbone: keras.Model, path: Path, name: str) -> None:
    if not path.is_file():
        raise UserError(f"--weights {path}: no such file; give imagenet, none, or a file of weights of {name}")
    if path.suffix != ".h5":
        raise UserError(f"--weights {path}: must end in .h5 or .weights.h5, as Keras saves a backbone's weights")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Skipping")  # Keras loads what it can and only warns of the rest
            backbone.load_weights(path)
    except Exception as error:  # Keras and h5py raise many kinds for a file that does not fit
        raise UserError(
            f"--weights {path}: does not fit {name} without its top layers: {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def build_model(
    name: str,
    input_size: int,
    num_classes: int,
    weights: str = "none",
    alpha: float = 1.0,
    augmentation: str = "flip",
    seed: int = 0,
) -> keras.Model:
    """A network for fine-tuning, with a new head.

    Args:
        name: a key of `ARCHITECTURES`.
        input_size: height and width in pixels.
        num_classes: number of logits.
        weights: "imagenet", "none", or the path of a .h5 or .weights.h5 file of the backbone without its top.
        alpha: width of MobileNetV2; the others have none.
        augmentation: "none", "flip" (paper) or "flip_rotation" (its published scripts).
        seed: of the augmentation and dropout; new weights follow Keras' global seed.

    Raises:
        UserError: the size does not suit the network, or the weights cannot be had or do not fit.
    """
    architecture = ARCHITECTURES[name]
    backbone = freeze_batch_norm_statistics(_build_backbone(name, input_size, weights, alpha))
    inputs = keras.Input(_shape(input_size), name="image")
    x = inputs
    for layer in _augmentation(augmentation, seed):
        x = layer(x)
    x = backbone(architecture.preprocess(x))
    if architecture.pool:
        x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    x = keras.layers.Dropout(DROPOUT, seed=seed + 2, name="dropout")(x)
    outputs = keras.layers.Dense(num_classes, name=HEAD, dtype="float32")(x)
    return keras.Model(inputs, outputs, name=f"{name}_classifier")


def tensor_names(model: keras.Model) -> list[str]:
    """One unique name for each of `model.trainable_variables`, in their order."""
    seen: dict[str, int] = {}
    names = []
    for variable in model.trainable_variables:
        count = seen[variable.path] = seen.get(variable.path, 0) + 1
        names.append(variable.path if count == 1 else f"{variable.path}#{count}")
    return names


def head_mask(model: keras.Model) -> np.ndarray:
    """Bool [N] over `model.trainable_variables`: True for those of the new head, which every scheme trains."""
    head = {id(variable) for variable in model.get_layer(HEAD).trainable_variables}
    return np.array([id(variable) in head for variable in model.trainable_variables])


def normalisation_and_bias_mask(model: keras.Model) -> np.ndarray:
    """Bool [N] over `model.trainable_variables`: scales and shifts of normalisation layers, biases, and the head."""
    names = np.array([variable.name in ("gamma", "beta", "bias") for variable in model.trainable_variables])
    return names | head_mask(model)
