"""The networks: a backbone with frozen batch-norm statistics and a new head, or a Keras model of the user's own.

Every network takes uint8 or float images [batch, size, size, 3] in 0…255 and returns logits [batch, classes]:

    augmentation -> preprocessing -> backbone -> (global average pooling) -> dropout 0.2 -> dense "head"
    augmentation -> own model (from a .keras file, or made by a function in a .py file)

Batch-norm statistics are frozen in every scheme (paper, section 6). Keras 3 cannot be asked for that by
`training=False`: a backbone called so inside a functional model still normalises by the statistics of the batch when
the outer model is called with `training=True`. So the layers themselves are replaced.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from utils import UserError

if TYPE_CHECKING:
    import argparse

DROPOUT = 0.2
HEAD = "head"


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

    def build_from_config(self, config: dict[str, Any]) -> None:
        """Make the variables; a file of `save_model` says here whether gamma and beta train."""
        if "trainable" in config:
            self.trainable = config["trainable"]
        super().build_from_config(config)


class _WhileSaved(FrozenBatchNormalization):
    """A frozen batch norm while `save_model` writes it: `trainable=False` freezes it in plain Keras too."""

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "trainable": False}

    def get_build_config(self) -> dict[str, Any] | None:
        config = super().get_build_config()
        return config and {**config, "trainable": self.trainable}


# Keras writes the name of a layer's class into files, and finds its weights there by it. Under the name of Keras' own
# layer they suit every program. Where our class is handed to Keras for that name, it comes before Keras' own, but only
# for the layers that were ours: for its own ones Keras notes no name to look up.
_KERAS_NAME = keras.layers.BatchNormalization.__name__
for _class in (FrozenBatchNormalization, _WhileSaved):
    _class.__module__, _class.__name__ = "keras.layers", _KERAS_NAME


def freeze_batch_norm_statistics(model: keras.Model) -> keras.Model:
    """Turn each BatchNormalization of `model`, however deeply nested, into a FrozenBatchNormalization; returns `model`.

    The layers change their class in place: this reaches the inside of nested models, wrappers and custom layers, which
    cloning a model does not.
    """
    for layer in model._flatten_layers():
        if type(layer) is keras.layers.BatchNormalization:
            layer.__class__ = FrozenBatchNormalization
    return model


def save_model(model: keras.Model, path: Path) -> None:
    """Save `model` as a .keras file that needs no code of this project.

    Frozen batch norms become Keras' own with `trainable=False`: they use and keep their statistics in training too; to
    train gamma and beta of such a layer elsewhere is to unfreeze it. Loaded by `load_model`, all is as it was. Layers
    of the user's own (and ViT's, from vit-keras) stay what they are; a batch norm inside them is theirs to make.

    `model` may be in use: only the class of those layers changes, and only meanwhile.
    """
    frozen = [layer for layer in model._flatten_layers() if type(layer) is FrozenBatchNormalization]
    try:
        for layer in frozen:
            layer.__class__ = _WhileSaved
        model.save(path)
    finally:
        for layer in frozen:
            layer.__class__ = FrozenBatchNormalization


def load_model(path: Path | str, flag: str) -> keras.Model:
    """The model in a .keras file, with frozen batch-norm statistics. Raises `UserError` naming `flag`."""
    try:
        with zipfile.ZipFile(path) as file:
            if b'"vit_keras.' in file.read("config.json"):
                import vit_keras.layers  # noqa: F401 Keras does not import what a file names
        frozen = {_KERAS_NAME: FrozenBatchNormalization}
        return freeze_batch_norm_statistics(keras.models.load_model(path, custom_objects=frozen, compile=False))
    except Exception as error:  # Keras raises many kinds, for damage as for layers it does not know
        raise UserError(
            f"{flag} {path}: Keras cannot load it: {first_line(error)} (a model with layers of its own is given "
            "as file.py:function)"
        ) from error


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
            raise UserError(f"--weights imagenet: {first_line(error)}") from error
        except Exception as error:  # Keras raises a bare Exception when its download fails
            raise UserError(
                f"--weights imagenet: the weights of {name} cannot be downloaded ({first_line(error)}); "
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
        raise UserError(f"--weights {path}: does not fit {name} without its top layers: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """What an error says, without the lines that follow the first."""
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
        name: a key of `ARCHITECTURES`, a .keras file, or file.py:function (see `build_own_model`).
        input_size: height and width in pixels.
        num_classes: number of logits.
        weights: "imagenet", "none", or the path of a .h5 or .weights.h5 file of the backbone without its top.
        alpha: width of MobileNetV2; the others have none.
        augmentation: "none", "flip" (paper) or "flip_rotation" (its published scripts).
        seed: of the augmentation and dropout; new weights follow Keras' global seed.

    Raises:
        UserError: the size does not suit the network, or the weights cannot be had or do not fit.
    """
    inputs = keras.Input(_shape(input_size), name="image")
    x = inputs
    for layer in _augmentation(augmentation, seed):
        x = layer(x)
    if name not in ARCHITECTURES:
        return keras.Model(inputs, build_own_model(name, input_size, num_classes, weights)(x), name="own_classifier")
    architecture = ARCHITECTURES[name]
    backbone = freeze_batch_norm_statistics(_build_backbone(name, input_size, weights, alpha))
    x = backbone(architecture.preprocess(x))
    if architecture.pool:
        x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    x = keras.layers.Dropout(DROPOUT, seed=seed + 2, name="dropout")(x)
    outputs = keras.layers.Dense(num_classes, name=HEAD, dtype="float32")(x)
    return keras.Model(inputs, outputs, name=f"{name}_classifier")


def build_from_options(args: argparse.Namespace) -> keras.Model:
    """The network that the options of a command line ask for; see `build_model`. Sets Keras' global seed."""
    keras.utils.set_random_seed(args.seed)
    return build_model(
        args.model_name, args.input_size, args.num_classes, args.weights, args.alpha, args.augmentation, args.seed
    )


def build_own_model(name: str, input_size: int, num_classes: int, weights: str = "none") -> keras.Model:
    """A user's own Keras model, with frozen batch-norm statistics and logits for `num_classes`.

    It must take images [batch, input_size, input_size, 3] in 0…255 (whatever scaling it needs belongs into it). A
    softmax at its end is taken off; a last dense layer for another number of classes is replaced by a new one.

    Args:
        name: a .keras file, or file.py:function; the function is called with the input shape (height, width, 3) and the
            number of classes.
        input_size: height and width in pixels.
        num_classes: number of logits.
        weights: "none", or a .h5 or .weights.h5 file for the model that the function makes.

    Raises:
        UserError: it cannot be loaded or made, or does not map such images to such logits.
    """
    shape = _shape(input_size)
    model = (
        load_model(name, "--model_name") if name.endswith(".keras") else _call_user_function(name, shape, num_classes)
    )
    try:
        if not model.built:
            model(np.zeros((1, *shape), np.float32))
        model = with_logits(freeze_batch_norm_statistics(model), num_classes, name)
        output = model(keras.Input(shape))
    except UserError:
        raise
    except Exception as error:  # whatever a user's layers raise
        takes = getattr(model, "input_shape", None)
        hint = f" (it takes {takes}; see --input_size)" if takes else ""
        raise UserError(
            f"--model_name {name}: does not take images of shape {shape}{hint}: {first_line(error)}"
        ) from error
    if tuple(getattr(output, "shape", ())) != (None, num_classes):
        raise UserError(
            f"--model_name {name}: returns {getattr(output, 'shape', type(output).__name__)}, not logits for "
            f"{num_classes} classes: (None, {num_classes})"
        )
    if not model.trainable_variables:
        raise UserError(
            f"--model_name {name}: has no trainable weights; set `trainable = True` on what is to be trained"
        )
    if weights != "none":
        _load_weights(model, Path(weights), name)
    return model


def _call_user_function(name: str, shape: tuple[int, int, int], num_classes: int) -> keras.Model:
    file, _, function = name.rpartition(":")
    path = Path(file).resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UserError(f"--model_name {name}: {file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # it may import its neighbours
    try:
        spec.loader.exec_module(module)
        if not hasattr(module, function):
            raise UserError(f"--model_name {name}: {file} has no function '{function}'")
        model = getattr(module, function)(shape, num_classes)
    except UserError:
        raise
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = f" line {frames[-1].lineno}" if frames else ""
        raise UserError(f"--model_name {name}: {file}{line}: {type(error).__name__}: {first_line(error)}") from error
    finally:
        sys.path.remove(str(path.parent))
    if not isinstance(model, keras.Model):
        raise UserError(f"--model_name {name}: must return a keras.Model, not {type(model).__name__}")
    return model


def with_logits(model: keras.Model, num_classes: int, name: str) -> keras.Model:
    """`model` without a softmax at its end and with a last dense layer for `num_classes`, if its graph shows them."""
    if len(getattr(model, "outputs", None) or ()) != 1:
        return model
    output = model.outputs[0]
    last = output._keras_history.operation
    softmax = keras.activations.softmax
    if isinstance(last, keras.layers.Softmax) or (
        isinstance(last, keras.layers.Activation) and last.activation is softmax
    ):
        output = last.input
        last = output._keras_history.operation
    if isinstance(last, keras.layers.Dense):
        if last.units != num_classes:
            print(
                f"{name}: last layer {last.name} has {last.units} outputs; a new one for {num_classes} takes its place"
            )
            output = keras.layers.Dense(num_classes, name=HEAD)(last.input)
        elif last.activation is softmax:
            last.activation = keras.activations.linear
    return model if output is model.outputs[0] else keras.Model(model.inputs, output, name=model.name)


def tensor_names(model: keras.Model) -> list[str]:
    """One unique name for each of `model.trainable_variables`, in their order."""
    seen: dict[str, int] = {}
    names = []
    for variable in model.trainable_variables:
        count = seen[variable.path] = seen.get(variable.path, 0) + 1
        names.append(variable.path if count == 1 else f"{variable.path}#{count}")
    return names


def head_mask(model: keras.Model) -> np.ndarray:
    """Bool [N] over `model.trainable_variables`: True for those of the head, which every scheme trains.

    The head is what is met first on every way back from the output: the last layers that have trainable weights.
    """
    head = {id(variable) for layer in _last_layers(model) for variable in layer.trainable_variables}
    return np.array([id(variable) in head for variable in model.trainable_variables])


def _last_layers(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    outputs = getattr(layer, "outputs", None)
    if not outputs:  # no graph to follow: whichever inner layer owns the last variable
        last = id(layer.trainable_variables[-1])
        owners = [inner for inner in layer._flatten_layers() if last in map(id, inner._trainable_variables)]
        return owners[:1] or [layer]
    found: list[keras.layers.Layer] = []
    ways, seen = list(outputs), set()
    while ways:
        tensor = ways.pop()
        operation, node, _ = tensor._keras_history
        if (id(operation), node) in seen:
            continue
        seen.add((id(operation), node))
        if getattr(operation, "trainable_variables", None):
            found += _last_layers(operation)
        else:
            ways += operation._inbound_nodes[node].input_tensors
    return found


def normalisation_and_bias_mask(model: keras.Model) -> np.ndarray:
    """Bool [N] over `model.trainable_variables`: scales and shifts of normalisation layers, biases, and the head."""
    names = np.array([variable.name in ("gamma", "beta", "bias") for variable in model.trainable_variables])
    return names | head_mask(model)
