"""FLOPs of each operation of a traced graph, by its type and shapes.

They say how much an operation computes, not how fast. Shares of a step follow from them (`estimate`), and a run's
FLOPs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from elastic_trainer.networks.graphs import BRANCHES, bodies, needed_operations

if TYPE_CHECKING:
    import tensorflow as tf


# TensorFlow's own registry (tensorflow.python.profiler.internal.flops_registry) knows Conv2D and its gradients,
# DepthwiseConv2dNative, MatMul and BatchMatMul, in channels-last and with known shapes alone. It lacks the depthwise
# gradients, Einsum and loops, and counts a BatchMatMul whose factors are transposed over the wrong axis. All
# contractions are therefore counted here; a test compares them with the registry where that is right.
_CONVOLUTIONS = {  # type -> inputs that hold (the filter, what it computed or that one's gradient); None: its output
    **dict.fromkeys(("Conv2D", "Conv3D", "DepthwiseConv2dNative"), (1, None)),
    **dict.fromkeys(("Conv2DBackpropInput", "Conv3DBackpropInputV2", "DepthwiseConv2dNativeBackpropInput"), (1, 2)),
    **dict.fromkeys(
        ("Conv2DBackpropFilter", "Conv3DBackpropFilterV2", "DepthwiseConv2dNativeBackpropFilter"), (None, 2)
    ),
}
# Type -> attribute that says whether the first factor is transposed.
_PRODUCTS = {"MatMul": "transpose_a", **dict.fromkeys(("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), "adj_x")}
# These only name, store or view the results of others.
_FREE = {
    *("Const", "Placeholder", "Identity", "IdentityN", "NoOp", "ReadVariableOp", "VarHandleOp", "Assert", "Reshape"),
    *("Squeeze", "ExpandDims", "Shape", "ShapeN", "StopGradient", "PreventGradient"),
}


def contraction_flops(op: tf.Operation) -> float | None:
    """FLOPs (2 a multiply-accumulate) of a convolution, a matrix product or their gradients; None for other kinds.

    Where a shape is not known the count is 0.
    """
    if op.type in _CONVOLUTIONS:
        kernel, computed = (op.outputs[0] if k is None else op.inputs[k] for k in _CONVOLUTIONS[op.type])
        if kernel.shape.rank is None:
            return 0.0
        # Each value computed sums over one filter: its height, width, and depth where it is not depthwise.
        summed = kernel.shape[: -2 if "Depthwise" in op.type else -1]
        return 2.0 * _elements(computed) * math.prod(size or 0 for size in summed)
    if op.type in _PRODUCTS:
        shape = op.inputs[0].shape
        if shape.rank is None:
            return 0.0
        return 2.0 * _elements(op.outputs[0]) * (shape[-2 if op.get_attr(_PRODUCTS[op.type]) else -1] or 0)
    if op.type == "Einsum":
        return _einsum_flops(op)
    return None


def _einsum_flops(op: tf.Operation) -> float:
    labels = op.get_attr("equation").decode().partition("->")[0].split(",")
    sizes, batch = dict[str, int](), 1
    for term, tensor in zip(labels, op.inputs, strict=True):
        if tensor.shape.rank is None:
            return 0.0
        shape = [size or 0 for size in tensor.shape.as_list()]
        before, dots, after = term.strip().partition("...")
        if dots:  # an ellipsis stands for the axes in the middle, the same (or 1) in each factor
            inner = shape[len(before) : len(shape) - len(after)]
            batch = max(batch, math.prod(inner))
            shape = shape[: len(before)] + shape[len(shape) - len(after) :]
        for label, size in zip(before + after, shape, strict=True):
            sizes[label] = max(sizes.get(label, 0), size)
    return (2.0 if len(op.inputs) > 1 else 1.0) * batch * math.prod(sizes.values())


def _elements(tensor: tf.Tensor) -> int:
    """How many values a tensor holds; 0 where that is not known, and for handles, which hold none."""
    if tensor.dtype.name in ("resource", "variant", "string"):
        return 0
    return tensor.shape.num_elements() or 0


def count_flops(graph: Any, contractions_alone: bool = False) -> dict[str, float]:
    """FLOPs of each operation of `graph`, a function's graph (FuncGraph), by name.

    Contractions as in `contraction_flops`; all others one for each element they read or write, or none. A loop counts
    its body as often as it runs if the graph says so (`maximum_iterations`, as Keras' recurrent layers set it, also on
    the way back), else once; a branch counts its dearer side. What no result needs counts 0: it is never executed.
    """

    def flops(op: tf.Operation) -> float:
        found = contraction_flops(op)
        return (0.0 if contractions_alone else _sum(_elements, op)) if found is None else found

    return _counted(graph, flops)


def count_bytes(graph: Any) -> dict[str, float]:
    """Bytes that each operation of `graph` reads or writes, by name; loops and branches as for `count_flops`."""
    return _counted(graph, lambda op: _sum(lambda tensor: _elements(tensor) * tensor.dtype.size, op))


def _sum(size: Callable[[tf.Tensor], int], op: tf.Operation) -> float:
    return float(sum(map(size, (*op.inputs, *op.outputs))))


def _counted(graph: Any, cost: Callable[[tf.Operation], float]) -> dict[str, float]:
    """The cost of each operation of `graph`, by name."""
    executed = needed_operations([*graph.outputs, *graph.control_outputs])
    return {op.name: _op_cost(op, cost) if op.name in executed else 0.0 for op in graph.get_operations()}


def _op_cost(op: tf.Operation, cost: Callable[[tf.Operation], float]) -> float:
    if op.type in _FREE:
        return 0.0
    if op.type in BRANCHES:
        inner = [sum(_counted(body, cost).values()) for body in bodies(op)]
        return _trips(op) * sum(inner) if "While" in op.type else max(inner, default=0.0)
    return cost(op)


def _trips(loop: tf.Operation) -> int:
    """How often a loop runs: its second input is the most that it may, forward and on the way back (-1: no limit)."""
    import tensorflow as tf

    limit = loop.inputs[1] if len(loop.inputs) > 1 else None
    while limit is not None and limit.op.type in ("Max", "Cast", "Identity"):  # Keras: the maximum of one constant
        limit = limit.op.inputs[0]
    value = None if limit is None else tf.get_static_value(limit)
    return int(value) if value is not None and value.ndim == 0 and value.dtype.kind == "i" and value > 0 else 1
