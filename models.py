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
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import utils
from elastic_trainer.cli.options import KERAS_NETWORKS, WIDTHS, is_own_model
from elastic_trainer.networks import pretrained
from elastic_trainer.networks.batch_norm import freeze_batch_norm_statistics, load_model
from elastic_trainer.networks.tensors import HEAD, trained_mask
from elastic_trainer.runs.energy import available_memory_mb
from elastic_trainer.training.optimizers import SLOTS
from utils import UserError

if TYPE_CHECKING:
    import argparse

DROPOUT = 0.2
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
        return function(input_shape=_shape(size), include_top=False, weights=weights, **width)

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


def _shape(size: int) -> tuple[int, int, int]:
    return (size, size, 3)


def _build_vit(size: int, alpha: float, weights: str | None) -> keras.Model:
    from vit_keras import vit

    network = vit.vit_b16(image_size=size, pretrained=weights == "imagenet", include_top=False, pretrained_top=False)
    # vit-keras takes the class token by a Lambda layer, which Keras 3 refuses to load again; slicing does the same.
    return keras.Model(network.inputs, network.get_layer("Transformer_encoder_norm").output[:, 0], name="vit_b16")


def _augmentation(kind: str, seed: int) -> list[keras.layers.Layer]:
    layers: list[keras.layers.Layer] = []
    if kind in ("flip", "flip_rotate"):
        layers.append(keras.layers.RandomFlip("horizontal", seed=seed))
    if kind == "flip_rotate":
        layers.append(keras.layers.RandomRotation(0.2, seed=seed + 1))
    return layers


def _build_backbone(name: str, size: int, weights: str, alpha: float) -> keras.Model:
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


def build_model(
    name: str,
    input_size: int,
    num_classes: int,
    weights: str = "none",
    alpha: float = 1.0,
    augment: str = "flip",
    seed: int = 0,
) -> keras.Model:
    """A network for fine-tuning, with a new head.

    Args:
        name: a network we know (see `architecture`), a .keras file, or file.py:function (see `build_own_model`).
        input_size: height and width in pixels.
        num_classes: number of logits.
        weights: "imagenet", "none", or a path (see `pretrained.load`).
        alpha: width of a MobileNet; the others have none.
        augment: "none", "flip" (paper) or "flip_rotate" (its published scripts).
        seed: of augmentation and dropout; new weights follow Keras' global seed.

    Raises:
        UserError: the size does not suit the network, or the weights cannot be had or do not fit.
    """
    inputs = keras.Input(_shape(input_size), name="image")
    x = inputs
    for layer in _augmentation(augment, seed):
        x = layer(x)
    if is_own_model(name):
        own = build_own_model(name, input_size, num_classes)
        model = keras.Model(inputs, own(x), name="own_classifier")
        if weights != "none":
            pretrained.load(model, own, Path(weights), name)
        return model
    parts = architecture(name)
    backbone = freeze_batch_norm_statistics(_build_backbone(name, input_size, weights, alpha))
    x = backbone(parts.preprocess(x))
    if parts.pool:
        x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    x = keras.layers.Dropout(DROPOUT, seed=seed + 2, name="dropout")(x)
    outputs = keras.layers.Dense(num_classes, name=HEAD, dtype="float32")(x)
    model = keras.Model(inputs, outputs, name=f"{name}_classifier")
    if weights not in ("imagenet", "none"):
        pretrained.load(model, backbone, Path(weights), name)
    return model


def mixed_precision_policy() -> str:
    """Keras' policy for this machine: float16 on a GPU, bfloat16 on a CPU with instructions for it.

    Raises:
        UserError: the CPU has none (it would compute in float32 all the same, and convert to and fro).
    """
    if tf.config.list_physical_devices("GPU"):
        return "mixed_float16"
    if not utils.has_bfloat16():
        raise UserError("--mixed_precision: this machine has neither a GPU nor a CPU with bfloat16; leave it out")
    return "mixed_bfloat16"


def build_from_options(args: argparse.Namespace) -> keras.Model:
    """The network that the options of a command line ask for; see `build_model`. Sets Keras' seed and precision."""
    keras.utils.set_random_seed(args.seed)
    keras.mixed_precision.set_global_policy(mixed_precision_policy() if args.mixed_precision else "float32")
    return build_model(
        args.model_name, args.input_size, args.num_classes, args.weights, args.alpha, args.augment, args.seed
    )


def build_own_model(name: str, input_size: int, num_classes: int) -> keras.Model:
    """A user's own Keras model, with frozen batch-norm statistics and logits for `num_classes`.

    It must take images [batch, input_size, input_size, 3] in 0…255 (whatever scaling it needs belongs into it). A
    softmax at its end is taken off; a last dense layer for another number of classes is replaced by a new one.

    Args:
        name: a .keras file, or file.py:function; the function is called with the input shape (height, width, 3) and the
            number of classes.
        input_size: height and width in pixels.
        num_classes: number of logits.

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
            f"--model_name {name}: does not take images of shape {shape}{hint}: {utils.first_line(error)}"
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
    return model


def _call_user_function(name: str, shape: tuple[int, int, int], num_classes: int) -> keras.Model:
    file, _, function = name.rpartition(":")
    path = Path(file).resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UserError(f"--model_name {name}: {file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)  # as an import would: dataclasses and Keras' files look there
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
        raise UserError(
            f"--model_name {name}: {file}{line}: {type(error).__name__}: {utils.first_line(error)}"
        ) from error
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


# --- memory -----------------------------------------------------------------------------------------------------------

# The gradient of their kernel or scale is computed from their input, which is therefore kept until then.
_INPUT_KEEPERS = (
    keras.layers.Dense,
    keras.layers.Conv1D,
    keras.layers.Conv2D,
    keras.layers.Conv3D,
    keras.layers.DepthwiseConv1D,
    keras.layers.DepthwiseConv2D,
    keras.layers.BatchNormalization,
)
_SAME_MEMORY = ("Flatten", "Reshape", "Squeeze", "ExpandDims", "Identity")  # layers that return what they were given


def memory_needed_mb(
    model: keras.Model, batch_size: int, slots: int, mask: np.ndarray, measures_importance: bool = False
) -> float:
    """What training `model` takes in MB at the very least, beside its weights, by the shapes in its graph.

    Counted are the batch, the optimizer's variables, and the larger of two things that are not there at one time: what
    the backward pass needs of the forward pass, and all gradients. Of the forward pass only inputs of convolutions,
    dense layers and batch norm count. Left out are TensorFlow itself, its buffers, and layers within custom layers.

    Args:
        model: the network.
        batch_size: images a step.
        slots: variables that the optimizer keeps of each trainable one.
        mask: bool [N] over `model.trainable_variables`, what trains.
        measures_importance: each selection computes all gradients at once and keeps a copy of weights and optimizer.
    """
    trainable_bytes = [prod(v.shape) * tf.as_dtype(v.dtype).size for v in model.trainable_variables]
    gradient_bytes = sum(size for size, taken in zip(trainable_bytes, mask, strict=True) if taken)
    lasting_bytes = slots * sum(trainable_bytes)
    if measures_importance:
        lasting_bytes += (1 + slots) * sum(trainable_bytes)
    trained = {id(v) for v, taken in zip(model.trainable_variables, mask, strict=True) if taken}
    kept: dict[int, int] = {}
    largest_call = 0
    for layer, inputs, outputs in _layer_calls(model):
        if not isinstance(layer, _INPUT_KEEPERS):
            continue
        sizes = {id(tensor): _tensor_bytes(tensor, batch_size) for tensor in map(_source, inputs) if tensor is not None}
        if not isinstance(layer, keras.layers.BatchNormalization):  # which may write over its input
            largest_call = max(largest_call, sum(sizes.values()) + _tensor_bytes(outputs[0], batch_size))
        if any(id(v) in trained and v.name not in ("bias", "beta") for v in layer.trainable_variables):
            kept |= sizes
    batch_bytes = 4 * batch_size * prod(model.input_shape[1:])
    return (batch_bytes + lasting_bytes + max(sum(kept.values()), largest_call, gradient_bytes)) / 1e6


def _layer_calls(model: keras.Model) -> list[tuple[Any, list[Any], list[Any]]]:
    """Each call (layer, inputs, outputs) in the graph of `model` and of the models within it, where there is one."""
    calls: list[tuple[Any, list[Any], list[Any]]] = []
    ways, seen = list(getattr(model, "outputs", None) or ()), set[tuple[int, int]]()
    while ways:
        operation, index, _ = ways.pop()._keras_history
        if (id(operation), index) in seen:
            continue
        if getattr(operation, "outputs", None) and not any(id(operation) == done for done, _ in seen):
            calls += _layer_calls(operation)
        seen.add((id(operation), index))
        node = operation._inbound_nodes[index]
        calls.append((operation, node.input_tensors, node.output_tensors))
        ways += node.input_tensors
    return calls


def _source(tensor: Any) -> Any:
    """The symbolic tensor whose memory `tensor` is: through reshapes, and into the models that return it.

    None for what a model is given: that is the memory of another, or the batch itself.
    """
    while True:
        operation, index, position = tensor._keras_history
        if isinstance(operation, keras.layers.InputLayer):
            return None
        if getattr(operation, "outputs", None):
            tensor = operation.outputs[position]
        elif type(operation).__name__ in _SAME_MEMORY:
            tensor = operation._inbound_nodes[index].input_tensors[0]
        else:
            return tensor


def _tensor_bytes(tensor: Any, batch_size: int) -> int:
    """Size of a symbolic tensor at a batch size, or 0 where the graph does not tell."""
    if None in tensor.shape[1:]:
        return 0
    return batch_size * prod(tensor.shape[1:]) * tf.as_dtype(tensor.dtype).size


def check_memory(model: keras.Model, args: argparse.Namespace) -> None:
    """Raise `UserError` if training by these options needs more memory than the system can give now.

    Says nothing where the system does not tell, or where a GPU with memory of its own trains.
    """
    available_mb = available_memory_mb()
    if available_mb is None or tf.config.list_physical_devices("GPU"):
        return
    scheme = getattr(args, "train_type", "full_training")  # the profiler trains everything
    mask = trained_mask(model, scheme, getattr(args, "trained_layers", 1))
    needed_mb = memory_needed_mb(
        model, args.batch_size, SLOTS[args.optimizer], mask, scheme.startswith("elastic_training")
    )
    if needed_mb > available_mb:
        raise UserError(
            f"--batch_size {args.batch_size}: training {args.model_name} on images of {args.input_size}×"
            f"{args.input_size} takes at least {needed_mb:,.0f} MB more, and {available_mb:,.0f} MB are available; "
            "choose a smaller one, or a smaller --input_size"
        )
