"""Layers as a step computes them: frozen batch norm multiplied into the layer before it, and small convolutions faster.

    batch_norm(layer(x)) = x * (W·s) + (beta + (b - mean)·s),   s = gamma / sqrt(variance + epsilon)

W and b are the layer's kernel and bias. The result and all gradients are the same up to rounding, and a step no longer
passes over the layer's output to normalise it, forward or backward. In such a pair, a small pointwise convolution is
computed as a product of matrices, and a zero-padding layer before it as its own padding. Saved models and exports stay
as they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import takewhile
from math import prod
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from elastic_trainer.networks.batch_norm import FrozenBatchNormalization
from elastic_trainer.networks.graphs import functional_graph, graph_nodes, is_graph, nested_graphs

_LAYERS = (keras.layers.Conv2D, keras.layers.DepthwiseConv2D, keras.layers.Dense)
# Multiply-adds of the forward pass up to which a product of matrices with its gradients is at least as fast as the
# pointwise convolution: beyond, it was up to 1.2 times slower, and without gradients 1.1 to 1.4 times
# (docs/log/step_time.md).
LARGEST_PRODUCT = 250e6

# By layer and kind ("kernel" or "bias"): a variable outside the network, and what computes its value.
FrozenValues = Mapping[tuple[Any, str], tuple[tf.Variable, Callable[[], tf.Tensor]]]


class Pair(NamedTuple):
    """A convolution, depthwise convolution or dense layer, and the frozen batch norm that alone reads its output."""

    layer: Any
    norm: FrozenBatchNormalization
    padding: keras.layers.ZeroPadding2D | None = None  # that only `layer` reads, if it pads as TensorFlow's "same" does

    @property
    def tensors(self) -> list[keras.Variable]:
        """The kernel, beta and the bias, as far as there are any, and gamma last."""
        every = self.layer.kernel, self.norm.beta, self.layer.bias, self.norm.gamma
        return [variable for variable in every if variable is not None]

    @property
    def kernel_variables(self) -> list[keras.Variable]:
        """What the folded kernel depends on and may train: the kernel, then gamma if there is one."""
        return [self.layer.kernel, *([self.norm.gamma] if self.norm.scale else [])]

    @property
    def parts(self) -> tuple[tuple[str, Callable[[], tf.Tensor], list[keras.Variable]], ...]:
        """What is folded: its kind, a function that computes it, and the variables that it depends on."""
        return ("kernel", self.kernel, self.kernel_variables), ("bias", self.bias, self.tensors[1:])

    def is_worth_it(self, trained: Collection[int]) -> bool:
        """Whether folding saves time if the variables with these `id`s train.

        In a folded pair gamma's gradient needs the kernel's, which costs more if the kernel does not train.
        """
        return id(self.layer.kernel) in trained or id(self.norm.gamma) not in trained

    def scale(self) -> tf.Tensor:
        """What each channel is multiplied by, float32 [channels]."""
        factor = tf.math.rsqrt(tf.cast(self.norm.moving_variance.value, tf.float32) + self.norm.epsilon)
        return factor * tf.cast(self.norm.gamma.value, tf.float32) if self.norm.scale else factor

    def kernel(self) -> tf.Tensor:
        """The folded kernel, in the type of the layer's."""
        kernel = tf.convert_to_tensor(self.layer.kernel.value)
        scale = self.scale()
        if isinstance(self.layer, keras.layers.DepthwiseConv2D):  # [height, width, channels, outputs per channel]
            scale = tf.reshape(scale, kernel.shape[-2:])
        return kernel * tf.cast(scale, kernel.dtype)

    def bias(self) -> tf.Tensor:
        """The folded bias, float32 [channels]."""
        bias = -tf.cast(self.norm.moving_mean.value, tf.float32)
        if self.layer.use_bias:
            bias += tf.cast(self.layer.bias.value, tf.float32)
        bias *= self.scale()
        return bias + tf.cast(self.norm.beta.value, tf.float32) if self.norm.center else bias


def frozen_values(model: keras.Model, trained: Collection[int]) -> FrozenValues:
    """The folded kernels and biases that depend on no variable with an `id` in `trained`.

    They are made before the function that uses them is traced: no variable can be made within.
    """
    return {
        (pair.layer, kind): (tf.Variable(compute(), trainable=False), compute)
        for pair in find_pairs(model)
        if pair.is_worth_it(trained)
        for kind, compute, variables in pair.parts
        if not any(id(variable) in trained for variable in variables)
    }


def find_pairs(model: keras.Model) -> list[Pair]:
    """The pairs of `model` that can be folded, nested functional and sequential models included.

    Layers within layers that are no such model stay as they are: what those compute is not known.
    """
    graphs = nested_graphs(model)
    nodes = [node for graph in graphs for node in graph_nodes(graph)]
    producer = {id(tensor): node.operation for node in nodes for tensor in node.outputs}
    reads = [(node.operation, tensor) for node in nodes for tensor in node.input_tensors]
    reads += [(None, tensor) for graph in graphs for tensor in functional_graph(graph).outputs]
    readers_of, sources_of = defaultdict[Any, set[Any]](set), defaultdict[Any, set[Any]](set)
    for reader, tensor in reads:
        source = producer.get(id(tensor))
        readers_of[source].add(reader)
        sources_of[reader].add(source)
    layers = {node.operation for node in nodes if isinstance(node.operation, keras.layers.Layer)}
    opaque = {
        id(inner) for layer in layers if not is_graph(layer) for inner in layer._flatten_layers(include_self=False)
    }
    pairs = []
    for norm, sources in sources_of.items():
        [layer, *others] = sources
        alone = not others and readers_of[layer] == {norm} and not {id(layer), id(norm)} & opaque
        if alone and type(layer) in _LAYERS and _fits(layer, norm):
            [before, *more] = sources_of[layer]
            is_own = not more and readers_of[before] == {layer} and id(before) not in opaque
            pairs.append(Pair(layer, norm, before if is_own and _pads_as_same(before, layer) else None))
    return pairs


def _fits(layer: Any, norm: Any) -> bool:
    """Whether `norm` normalises the channels of a product with the kernel of `layer`, and of nothing else."""
    return (
        type(norm) is FrozenBatchNormalization
        and norm.axis in (-1, len(layer._inbound_nodes[0].outputs[0].shape) - 1)
        and getattr(layer, "data_format", "channels_last") == "channels_last"
        and layer.activation in (None, keras.activations.linear)
        and layer.activity_regularizer is None
        and not getattr(layer, "lora_enabled", False)
        and getattr(layer, "quantization_mode", None) is None
        and layer.compute_dtype == norm.compute_dtype
        # Where the processor has no instructions for it, TensorFlow also adds up in bfloat16: gradients of kernel and
        # bias were off by a fifth to two thirds, also without folding, which would take gamma's and beta's from them.
        and layer.compute_dtype != "bfloat16"
    )


@contextmanager
def folded_batch_norm(
    model: keras.Model,
    trained: Collection[int] | None = None,
    frozen: FrozenValues | None = None,
    with_products: bool = True,
    rows: int | None = None,
) -> Iterator[list[Pair]]:
    """While a function that calls `model` is traced, fold each pair of it where that saves time; yields those pairs.

    Args:
        model: a network with frozen batch norm.
        trained: `id`s of the variables that the traced function trains. What depends on none of them is computed now,
            once, and becomes a constant of the function. If left out, nothing does: any variable may change.
        frozen: `frozen_values` for `trained`, which take the place of those constants, and can be computed again.
        with_products: compute small pointwise convolutions as products of matrices, where gradients pass.
        rows: examples of most batches, if the traced function takes any number; else what is small is not known.
    """

    def value(pair: Pair, kind: str, compute: Callable[[], tf.Tensor], variables: list[keras.Variable]) -> tf.Tensor:
        if frozen is not None and (pair.layer, kind) in frozen:
            return tf.convert_to_tensor(frozen[pair.layer, kind][0])
        if trained is None or any(id(variable) in trained for variable in variables):
            return compute()
        with tf.init_scope():  # outside the traced function
            return compute()

    calls: dict[Any, Any] = {}
    below = _below(model, trained)
    pairs = [pair for pair in find_pairs(model) if trained is None or pair.is_worth_it(trained)]
    for pair in pairs:
        with tf.name_scope(pair.layer.path or pair.layer.name):
            kernel, bias = (value(pair, *part) for part in pair.parts)
        has_gradient = any(id(variable) not in below for variable in pair.tensors)
        calls[pair.layer] = _folded_call(pair, kernel, bias, with_products and has_gradient, rows)
        calls[pair.norm] = _identity
        if pair.padding is not None:
            calls[pair.padding] = _identity
    try:
        for layer, call in calls.items():
            object.__setattr__(layer, "call", call)  # past Keras, which would track it as a part of the layer
        yield pairs
    finally:
        for layer in calls:
            object.__delattr__(layer, "call")


def _below(model: keras.Model, trained: Collection[int] | None) -> set[int]:
    """`id`s of the variables before the first one that trains, to which no gradient passes."""
    return {*takewhile(lambda one: trained is not None and one not in trained, map(id, model.variables))}


def _folded_call(pair: Pair, kernel: tf.Tensor, bias: tf.Tensor, with_products: bool, rows: int | None) -> Any:
    layer, padding = pair.layer, "same" if pair.padding is not None else getattr(pair.layer, "padding", None)

    def call(inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        weights = tf.cast(kernel, inputs.dtype)
        if isinstance(layer, keras.layers.Dense):
            product = keras.ops.matmul(inputs, weights)
        elif with_products and _is_product(layer, inputs, rows):
            product = _pointwise(inputs, weights)
        else:
            is_depthwise = isinstance(layer, keras.layers.DepthwiseConv2D)
            convolution = keras.ops.depthwise_conv if is_depthwise else keras.ops.conv
            product = convolution(inputs, weights, layer.strides, padding, layer.data_format, layer.dilation_rate)
        return tf.nn.bias_add(product, tf.cast(bias, product.dtype))  # TensorFlow fuses it with convolution and ReLU

    return call


def _pads_as_same(padding: Any, layer: Any) -> bool:
    """Whether zeros are added where `layer` would add them with padding "same"."""
    if type(padding) is not keras.layers.ZeroPadding2D or isinstance(layer, keras.layers.Dense):
        return False
    size = padding._inbound_nodes[0].input_tensors[0].shape[1:3]
    if layer.padding != "valid" or None in size or max(layer.dilation_rate) > 1:
        return False
    wanted = [
        max((-(-length // stride) - 1) * stride + kernel - length, 0)
        for length, stride, kernel in zip(size, layer.strides, layer.kernel_size, strict=True)
    ]
    return [tuple(pair) for pair in padding.padding] == [(total // 2, total - total // 2) for total in wanted]


def _is_product(layer: Any, inputs: tf.Tensor, rows: int | None) -> bool:
    """Whether `_pointwise` computes it, see `LARGEST_PRODUCT`."""
    is_pointwise = isinstance(layer, keras.layers.Conv2D) and layer.kernel_size == layer.strides == (1, 1)
    shape = (inputs.shape[0] or rows, *inputs.shape[1:])
    if not is_pointwise or layer.groups > 1 or None in shape:
        return False
    return prod(shape) * layer.filters <= LARGEST_PRODUCT


def _pointwise(inputs: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
    """A convolution with a kernel [1, 1, channels, outputs] as a product of matrices, faster where it is small.

    Its result has a row for each example, as features need (`engine.prefix`), and no batch size is written into it.
    """
    _, height, width, channels = inputs.shape
    rows = tf.matmul(tf.reshape(inputs, [-1, channels]), tf.reshape(kernel, kernel.shape[2:]))
    return tf.reshape(rows, [-1, height, width, kernel.shape[-1]])


def _identity(inputs: tf.Tensor, training: bool | None = None, mask: tf.Tensor | None = None) -> tf.Tensor:
    return inputs
