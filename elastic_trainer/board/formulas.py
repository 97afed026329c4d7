"""Operations of a training step, written with operations that LiteRT has kernels for.

LiteRT lacks the gradients of convolutions, pooling and activations. And of products with weights that change, only
BATCH_MATMUL is fast there (it alone reaches XNNPACK), so products are written with rank 3: the converter makes the slow
FULLY_CONNECTED of those with rank 2.

A formula takes an operation of a traced graph and the values of its inputs, and returns the values of its outputs.
Values are NumPy arrays where they are constant, else tensors. Shapes are known: a part of a batch has a fixed size.

The converter places each operation as soon as its inputs are there, and what is computed early stays in memory. So what
only the backward pass needs depends on the gradient, even where the forward pass would suffice: a kernel's gradient
shifts the gradient, not the input; the mask of ReLU6 has a bound that contains the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
import tensorflow as tf

Value = Any  # np.ndarray, or tf.Tensor of the graph that is being traced
Formulas = Mapping[str, Callable[..., Value]]  # by the type of the operation
HUGE = 1e30  # makes a mask of a value: 0 stays 0, all others pass 1


def is_constant(value: Value) -> bool:
    return isinstance(value, np.ndarray)


# --- products ---------------------------------------------------------------------------------------------------------


def product(a: Value, b: Value, transpose_a: bool = False, transpose_b: bool = False) -> Value:
    """The product of two matrices, as a BATCH_MATMUL."""
    result = tf.matmul(tf.reshape(a, (1, *a.shape)), tf.reshape(b, (1, *b.shape)), transpose_a, transpose_b)
    return tf.reshape(result, result.shape[1:])


def _rows(images: Value) -> Value:
    """[batch, height, width, channels] as a matrix with a row for each place."""
    return tf.reshape(images, (-1, images.shape[-1]))


def _matrix(kernel: Value, a: int, b: int) -> Value:
    """kernel[a, b] of a kernel [height, width, inputs, outputs], without a slice that drops axes: XNNPACK has none."""
    index, shape = a * kernel.shape[1] + b, kernel.shape[2:]
    matrices = tf.reshape(kernel, (-1, *shape))
    return tf.reshape(matrices if matrices.shape[0] == 1 else matrices[index : index + 1], shape)


# --- convolutions -----------------------------------------------------------------------------------------------------


class Window:
    """How the window of a convolution or pooling, or of a gradient of one, moves over images of `size`.

    All attributes are of both axes [height, width]: `before` are the zeros in front of the input, `outputs` is the size
    of the result, `reach` is by how much the window of size `kernel` is longer than one place.
    """

    def __init__(self, op: Any, size: Sequence[int], kernel: Sequence[int]) -> None:
        if op.get_attr("data_format") != b"NHWC" or op.get_attr("padding") == b"EXPLICIT":
            raise NotImplementedError("images whose channels come first, or explicit padding")
        names = {attribute.name for attribute in op.op_def.attr}
        self.size, self.kernel = [*size], [*kernel]
        self.strides = [*op.get_attr("strides")[1:3]]
        self.dilations = [*op.get_attr("dilations")[1:3]] if "dilations" in names else [1, 1]
        self.reach = [dilation * (length - 1) for dilation, length in zip(self.dilations, kernel, strict=True)]
        self.padding, self.before, self.outputs = op.get_attr("padding").decode(), [0, 0], []
        for axis in (0, 1):
            length, reach, stride = size[axis], self.reach[axis], self.strides[axis]
            if self.padding == "SAME":
                self.outputs.append(math.ceil(length / stride))
                self.before[axis] = max((self.outputs[axis] - 1) * stride + reach + 1 - length, 0) // 2
            else:
                self.outputs.append((length - reach - 1) // stride + 1)
        self.places = [(a, b) for a in range(kernel[0]) for b in range(kernel[1])]  # in the window

    def padded(self, images: Value, fill: float = 0.0) -> Value:
        """The input with its margins, of exactly the length that the windows cover."""
        axes = zip(self.outputs, self.strides, self.reach, strict=True)
        lengths = [(out - 1) * stride + reach + 1 for out, stride, reach in axes]
        return _fitted(images, self.before, lengths, fill)

    def at(self, padded: Value, a: int, b: int) -> Value:
        """Of `padded`, what each window has at (a, b): [batch, *outputs, channels]."""
        starts = a * self.dilations[0], b * self.dilations[1]
        return _strided(padded, starts, self.outputs, self.strides)

    def spread(self, gradient: Value) -> Value:
        """The gradient [batch, *outputs, channels] with zeros between its places and around it: `reach` longer than
        the input, so that the slice from `reach` - (a, b) on has at each place of the input the gradient that it has
        through (a, b) of the kernel."""
        lengths = [length + reach for length, reach in zip(self.size, self.reach, strict=True)]
        before = [reach - zeros for reach, zeros in zip(self.reach, self.before, strict=True)]
        return _fitted(_with_zeros_between(gradient, self.strides), before, lengths)

    def through(self, spread: Value, a: int, b: int) -> Value:
        """See `spread`: [batch, *size, channels]."""
        starts = [self.reach[0] - a * self.dilations[0], self.reach[1] - b * self.dilations[1]]
        return _strided(spread, starts, self.size, (1, 1))


def _fitted(images: Value, before: Sequence[int], lengths: Sequence[int], fill: float = 0.0) -> Value:
    """Images with `before` margins in front, and cut or padded behind to `lengths`; negative margins cut."""
    skipped = [max(-margin, 0) for margin in before]
    shape = images.shape
    kept = [min(shape[axis + 1] - skipped[axis], lengths[axis] - max(before[axis], 0)) for axis in (0, 1)]
    if kept != [*shape[1:3]]:
        images = _strided(images, skipped, kept, (1, 1))
    front = [max(margin, 0) for margin in before]
    behind = [lengths[axis] - kept[axis] - front[axis] for axis in (0, 1)]
    if not any(front) and not any(behind):
        return images
    margins = [(0, 0), (front[0], behind[0]), (front[1], behind[1]), (0, 0)]
    return tf.pad(images, margins, constant_values=fill)


def _strided(images: Value, starts: Sequence[int], counts: Sequence[int], strides: Sequence[int]) -> Value:
    """`counts` places of images from `starts` on, in steps of `strides`."""
    rows, columns = (slice(s, s + (n - 1) * step + 1, step) for s, n, step in zip(starts, counts, strides, strict=True))
    whole = [*starts] == [0, 0] and [*counts] == [*images.shape[1:3]] and [*strides] == [1, 1]
    return images if whole else images[:, rows, columns]


def _with_zeros_between(images: Value, strides: Sequence[int]) -> Value:
    """Images with strides - 1 zeros behind each place but the last, along both axes."""
    for axis, stride in ((2, strides[1]), (1, strides[0])):
        if stride > 1:
            before, (length, *after) = images.shape[:axis], images.shape[axis:]
            apart = tf.reshape(images, (math.prod(before), length, 1, math.prod(after)))
            apart = tf.pad(apart, [(0, 0), (0, 0), (0, stride - 1), (0, 0)])
            images = tf.reshape(apart, (*before, length * stride, *after))
            images = images[(*[slice(None)] * axis, slice((length - 1) * stride + 1))]
    return images


def _conv2d(op: Any, images: Value, kernel: Value) -> Value:
    window = Window(op, images.shape[1:3], kernel.shape[:2])
    groups = images.shape[-1] // kernel.shape[2]
    if is_constant(kernel) and groups == 1:
        return tf.nn.conv2d(images, kernel, window.strides, window.padding, dilations=window.dilations)

    def one_group(x: Value, w: Value) -> Value:
        return _sum([product(_rows(window.at(x, *place)), _matrix(w, *place)) for place in window.places])

    result = _by_group(one_group, groups, window.padded(images), kernel)
    return tf.reshape(result, (images.shape[0], *window.outputs, kernel.shape[-1]))


def _conv2d_input_gradient(op: Any, shape: Value, kernel: Value, gradient: Value) -> Value:
    window = Window(op, shape[1:3], kernel.shape[:2])
    groups = int(shape[-1]) // kernel.shape[2]
    spread = window.spread(gradient)
    if is_constant(kernel) and groups == 1:  # the convolution with the kernel reversed and transposed
        reversed_kernel = np.ascontiguousarray(kernel[::-1, ::-1].transpose(0, 1, 3, 2))
        return tf.nn.conv2d(spread, reversed_kernel, 1, "VALID", dilations=window.dilations)

    def one_group(d: Value, w: Value) -> Value:
        pairs = [(_rows(window.through(d, *place)), _matrix(w, *place)) for place in window.places]
        return _sum([product(*pair, transpose_b=True) for pair in pairs])

    return tf.reshape(_by_group(one_group, groups, spread, kernel), tuple(int(length) for length in shape))


def _conv2d_kernel_gradient(op: Any, images: Value, shape: Value, gradient: Value) -> Value:
    height, width, inputs, outputs = (int(length) for length in shape)
    window = Window(op, images.shape[1:3], (height, width))
    groups = images.shape[-1] // inputs
    stays = window.strides == [1, 1]
    values = (images, window.spread(gradient)) if stays else (window.padded(images), gradient)

    def one_group(x: Value, d: Value) -> Value:
        pairs = [(x, window.through(d, a, b)) if stays else (window.at(x, a, b), d) for a, b in window.places]
        return tf.stack([product(_rows(x), _rows(d), transpose_a=True) for x, d in pairs])

    return tf.reshape(_by_group(one_group, groups, *values), (height, width, inputs, outputs))


def _by_group(compute: Callable[..., Value], groups: int, *values: Value) -> Value:
    """The results for each group of channels, joined."""
    if groups == 1:
        return compute(*values)
    parts = zip(*(tf.split(value, groups, axis=-1) for value in values), strict=True)
    return tf.concat([compute(*part) for part in parts], axis=-1)


def _sum(values: Sequence[Value]) -> Value:
    return reduce(tf.add, values)


def _depthwise(op: Any, images: Value, kernel: Value) -> Value:
    window = Window(op, images.shape[1:3], kernel.shape[:2])
    return tf.nn.depthwise_conv2d(images, kernel, (1, *window.strides, 1), window.padding, dilations=window.dilations)


def _depthwise_input_gradient(op: Any, shape: Value, kernel: Value, gradient: Value) -> Value:
    height, width, inputs, each = kernel.shape
    window = Window(op, shape[1:3], (height, width))
    reversed_kernel = kernel[::-1, ::-1] if is_constant(kernel) else tf.reverse(kernel, (0, 1))
    reversed_kernel = tf.reshape(reversed_kernel, (height, width, inputs * each, 1))
    result = tf.nn.depthwise_conv2d(
        window.spread(gradient), reversed_kernel, (1, 1, 1, 1), "VALID", dilations=window.dilations
    )
    return result if each == 1 else tf.reduce_sum(tf.reshape(result, (*result.shape[:3], inputs, each)), -1)


def _depthwise_kernel_gradient(op: Any, images: Value, shape: Value, gradient: Value) -> Value:
    height, width, inputs, each = (int(length) for length in shape)
    window = Window(op, images.shape[1:3], (height, width))
    if each > 1:
        images = tf.repeat(images, each, axis=-1)
    spread, totals = window.spread(gradient), []
    for index in range(images.shape[0]):  # an image is the kernel that its own gradient is convolved with
        kernel = tf.reshape(images[index : index + 1], (*window.size, -1, 1))
        totals.append(tf.nn.depthwise_conv2d(spread[index : index + 1], kernel, (1, 1, 1, 1), "VALID"))
    reversed_sum = _strided(_sum(totals), (0, 0), window.kernel, window.dilations)
    return tf.reshape(tf.reverse(reversed_sum, (1, 2)), (height, width, inputs, each))


# --- pooling ----------------------------------------------------------------------------------------------------------


def _max_pool_gradient(op: Any, images: Value, pooled: Value, gradient: Value) -> Value:
    """The gradient goes to the first place of each window that has its maximum, as in TensorFlow."""
    window = Window(op, images.shape[1:3], op.get_attr("ksize")[1:3])
    padded = window.padded(images, fill=-HUGE)
    taken, passed = tf.zeros_like(pooled), []
    for a, b in window.places:
        first = tf.cast(tf.equal(window.at(padded, a, b), pooled), gradient.dtype) * (1.0 - taken)
        taken += first
        passed.append(first * gradient)
    return _gathered(window, passed)


def _average_pool_gradient(op: Any, shape: Value, gradient: Value) -> Value:
    window = Window(op, shape[1:3], op.get_attr("ksize")[1:3])
    ones = np.ones((1, *window.size, 1), np.float32)
    with tf.init_scope():
        counts = np.asarray(_sum([window.at(window.padded(ones), a, b) for a, b in window.places]))
    return _gathered(window, [gradient / counts] * len(window.places))


def _gathered(window: Window, passed: Sequence[Value]) -> Value:
    """What the places of the input receive, if each window passes `passed` to its places in turn."""
    parts = zip(window.places, passed, strict=True)
    return _sum([window.through(window.spread(each), a, b) for (a, b), each in parts])


# --- activations, normalisation, loss ---------------------------------------------------------------------------------


def _relu6_gradient(op: Any, gradient: Value, outputs: Value) -> Value:
    six = 6.0 + gradient[:1] * (1 / HUGE)
    return gradient * tf.clip_by_value(outputs * (six - outputs) * HUGE, -1.0, 1.0)


def _leaky_relu_gradient(op: Any, gradient: Value, inputs: Value) -> Value:
    positive = tf.clip_by_value(inputs * HUGE, 0.0, 1.0)
    return gradient * (positive + op.get_attr("alpha") * (1.0 - positive))


def _erf(op: Any, x: Value) -> Value:
    """Abramowitz and Stegun, formula 7.1.26: the error is at most 1.5e-7."""
    size = tf.abs(x)
    t = 1.0 / (1.0 + 0.3275911 * size)
    terms = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
    series = reduce(lambda total, factor: total * t + factor, terms[1:], terms[0]) * t
    return tf.sign(x) * (1.0 - series * tf.exp(-size * size))


def _batch_norm(op: Any, x: Value, scale: Value, offset: Value, mean: Value, variance: Value) -> list[Value]:
    if op.get_attr("is_training"):
        raise NotImplementedError("batch norm with the statistics of the batch")
    factor = scale * tf.math.rsqrt(variance + op.get_attr("epsilon"))
    return [x * factor + (offset - mean * factor)]


def _batch_norm_gradient(
    op: Any, d: Value, x: Value, scale: Value, mean: Value, variance: Value, *_: Value
) -> list[Value]:
    factor = tf.math.rsqrt(variance + op.get_attr("epsilon"))
    places = (0, 1, 2)
    return [d * (scale * factor), tf.reduce_sum(d * (x - mean), places) * factor, tf.reduce_sum(d, places)]


def _cross_entropy(op: Any, logits: Value, labels: Value) -> list[Value]:
    right = tf.one_hot(labels, logits.shape[-1])
    shifted = logits - tf.reduce_max(logits, -1, keepdims=True)
    powers = tf.exp(shifted)
    total = tf.reduce_sum(powers, -1, keepdims=True)
    losses = tf.math.log(total[:, 0]) - tf.reduce_sum(right * shifted, -1)
    return [losses, powers / total - right]


def _strided_slice_gradient(op: Any, shape: Value, begin: Value, end: Value, strides: Value, d: Value) -> Value:
    kinds = ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    masks = {f"{kind}_mask": op.get_attr(f"{kind}_mask") for kind in kinds}
    count = int(np.prod(shape))
    with tf.init_scope():
        places = np.arange(count, dtype=np.int32).reshape(shape)
        taken = tf.raw_ops.StridedSlice(input=places, begin=begin, end=end, strides=strides, **masks).numpy()
    return tf.reshape(tf.scatter_nd(taken.reshape(-1, 1), tf.reshape(d, [-1]), [count]), shape)


FORMULAS: Formulas = {
    "AddN": lambda op, *values: _sum(values),
    "AvgPoolGrad": _average_pool_gradient,
    "BiasAddGrad": lambda op, d: tf.reduce_sum(d, [*range(len(d.shape) - 1)]),
    "Conv2D": _conv2d,
    "Conv2DBackpropFilter": _conv2d_kernel_gradient,
    "Conv2DBackpropInput": _conv2d_input_gradient,
    "DepthwiseConv2dNative": _depthwise,
    "DepthwiseConv2dNativeBackpropFilter": _depthwise_kernel_gradient,
    "DepthwiseConv2dNativeBackpropInput": _depthwise_input_gradient,
    "EluGrad": lambda op, d, y: d * (tf.minimum(y, 0.0) + 1.0),
    "Erf": _erf,
    "Erfc": lambda op, x: 1.0 - _erf(op, x),
    "FusedBatchNormGradV3": _batch_norm_gradient,
    "FusedBatchNormV3": _batch_norm,
    "L2Loss": lambda op, x: tf.reduce_sum(x * x) / 2.0,
    "LeakyReluGrad": _leaky_relu_gradient,
    "MatMul": lambda op, a, b: product(a, b, op.get_attr("transpose_a"), op.get_attr("transpose_b")),
    "MaxPoolGrad": _max_pool_gradient,
    "ReciprocalGrad": lambda op, y, d: -d * y * y,
    "Relu6Grad": _relu6_gradient,
    "ReluGrad": lambda op, d, y: d * tf.clip_by_value(y * HUGE, 0.0, 1.0),
    "RsqrtGrad": lambda op, y, d: -0.5 * d * y * y * y,
    "SigmoidGrad": lambda op, y, d: d * y * (1.0 - y),
    "SoftplusGrad": lambda op, d, x: d * tf.sigmoid(x),
    "SparseSoftmaxCrossEntropyWithLogits": _cross_entropy,
    "SqrtGrad": lambda op, y, d: 0.5 * d / y,
    "StridedSliceGrad": _strided_slice_gradient,
    "TanhGrad": lambda op, y, d: d * (1.0 - y * y),
}
