"""Builds a traced graph again, operation by operation, with what LiteRT has kernels for (`board.formulas`).

Whatever depends on constants alone is computed now. Operations without a formula stay as they are: whether LiteRT has
a kernel for one, the converter knows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from elastic_trainer.board.formulas import FORMULAS, Value, is_constant
from elastic_trainer.errors import UserError
from elastic_trainer.networks.traced_graph import bodies, inputs_first, needed_operations

RANDOM = "StatelessRandomUniformV2"  # of dropout


def random_tensors(graph: Any, results: Sequence[Any], feeds: Sequence[str]) -> list[Any]:
    """The tensors of uniform random numbers that `results` depend on, given the tensors named `feeds`."""
    needed = needed_operations(results, feeds)
    return [op.outputs[0] for op in inputs_first(graph) if op.name in needed and op.type == RANDOM]


def rebuild(
    graph: Any, results: Sequence[Any], feeds: Mapping[str, Value], variables: Mapping[int, Value]
) -> list[Value]:
    """The values of `results` in the graph that is being traced.

    Args:
        graph: a function's graph (FuncGraph).
        results: tensors of it.
        feeds: values of its tensors, by name.
        variables: values of variables, by the `id` of their handle; others are constants.

    Raises:
        UserError: an operation is not covered; the message names it.
    """
    values: dict[str, Value] = dict(feeds)
    for outer, inner in graph.captures:
        values.setdefault(inner.name, outer if outer.dtype == tf.resource else outer.numpy())
    return _rebuilt(graph, results, values, variables)


def _rebuilt(
    graph: Any, results: Sequence[Any], values: dict[str, Value], variables: Mapping[int, Value]
) -> list[Value]:
    """See `rebuild`; `values` gets the values of the graph's tensors, and has the handles of its variables."""
    needed = needed_operations(results, [*values])
    for op in inputs_first(graph):
        if op.name not in needed or op.type == "Placeholder" or all(out.name in values for out in op.outputs):
            continue
        inputs = [values.get(tensor.name) for tensor in op.inputs]
        if op.type == "ReadVariableOp":
            outputs = [_read(inputs[0], op.outputs[0].dtype, variables)]
        elif op.type in ("PartitionedCall", "StatefulPartitionedCall"):
            [body] = bodies(op)
            given = {tensor.name: value for tensor, value in zip(body.inputs, inputs, strict=True)}
            outputs = _rebuilt(body, body.outputs, given, variables)
        else:
            outputs = _computed(op, inputs)
        values.update(zip((tensor.name for tensor in op.outputs), outputs, strict=False))
    return [values[tensor.name] for tensor in results]


def _read(handle: Any, dtype: tf.DType, variables: Mapping[int, Value]) -> Value:
    """The value of a variable: as given, else the one it has now."""
    found = variables.get(id(handle))
    if found is None:
        with tf.init_scope():
            found = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype).numpy()
    return found


def _computed(op: Any, inputs: list[Value]) -> list[Value]:
    """Values of the outputs of `op`."""
    if op.type in ("Identity", "StopGradient", "PreventGradient"):
        return inputs
    if op.type == "Const":
        return [tf.make_ndarray(op.get_attr("value"))]
    if op.type in ("Shape", "ShapeN"):  # shapes are known
        return [np.array(each.shape, op.outputs[0].dtype.as_numpy_dtype) for each in inputs]
    if all(is_constant(value) for value in inputs):
        with tf.init_scope():
            return [result.numpy() for result in _listed(_call(op, inputs))]
    try:
        return _listed(FORMULAS[op.type](op, *inputs) if op.type in FORMULAS else _call(op, inputs))
    except (NotImplementedError, AttributeError) as error:
        raise UserError(
            f"--export train_tflite: LiteRT cannot train this network: {op.type} ({op.name}): {error}"
        ) from error


def _listed(outputs: Any) -> list[Value]:
    if isinstance(outputs, (list, tuple)):
        return [*outputs]
    return [] if isinstance(outputs, tf.Operation) or outputs is None else [outputs]


def _call(op: Any, inputs: Sequence[Value]) -> Any:
    """Run or trace an operation like `op` on `inputs`."""
    function: Callable[..., Any] = getattr(tf.raw_ops, op.type)
    definition, waiting = op.op_def, [*inputs]
    arguments: dict[str, Any] = {}
    inferred = set()
    for argument in definition.input_arg:
        inferred |= {argument.type_attr, argument.number_attr, argument.type_list_attr}
        many = argument.number_attr or argument.type_list_attr
        if many:
            count = op.get_attr(many)
            count = count if isinstance(count, int) else len(count)
            arguments[argument.name], waiting = waiting[:count], waiting[count:]
        else:
            arguments[argument.name] = waiting.pop(0)
    for attribute in definition.attr:
        if attribute.name not in inferred:
            arguments[attribute.name] = op.get_attr(attribute.name)
    names = [*inspect.signature(function).parameters]
    unknown = [name for name in arguments if name not in names]  # Python calls a few arguments by other names
    free = (name for name in names if name not in arguments)
    return function(**{next(free) if name in unknown else name: value for name, value in arguments.items()})
