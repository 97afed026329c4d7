"""Builds a traced graph again, operation by operation, by formulas, such as those for LiteRT (`board.formulas`).

Whatever depends on constants alone is computed now. Operations without a formula stay as they are: whether LiteRT has
a kernel for one, the converter knows. What each step changes is no constant: random numbers are inputs, and a network
with other such operations, or with variables that its layers assign, is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from elastic_trainer.board.formulas import Formulas, Value, is_constant
from elastic_trainer.networks.graphs import bodies, inputs_first, is_stateful, needed_operations, written_variables
from elastic_trainer.system.errors import UserError, first_line

RANDOM = {  # operations -> their distribution, for which board_train.py draws the numbers
    "StatelessRandomUniformV2": "random",  # from 0 to 1: dropout
    "RandomUniform": "random",
    "StatelessRandomNormalV2": "normal",  # of mean 0 and deviation 1: Gaussian noise
    "RandomStandardNormal": "normal",
}
CALLS = ("PartitionedCall", "StatefulPartitionedCall")


def random_tensors(graph: Any, results: Sequence[Any], feeds: Sequence[str]) -> dict[str, Any]:
    """The random tensors that `results` depend on, given those named `feeds`, by a name such as `random_0`."""
    needed = _needed(graph, results, feeds)
    found = [op for op in inputs_first(graph) if op.name in needed and op.type in RANDOM]
    tensors = [(RANDOM[op.type], op.outputs[0]) for op in found if op.outputs[0].dtype == tf.float32]
    return {f"{kind}_{index}": tensor for index, (kind, tensor) in enumerate(tensors)}


def _needed(graph: Any, results: Sequence[Any], feeds: Sequence[str]) -> set[str]:
    """Names of the operations whose values `results` depend on: the step's updates are not among them."""
    return needed_operations(results, feeds, {op.name for op in graph.get_operations() if not op.outputs})


def rebuild(
    graph: Any,
    results: Sequence[Any],
    feeds: Mapping[str, Value],
    variables: Mapping[int, Value],
    formulas: Formulas,
) -> list[Value]:
    """The values of `results`, tensors of a function's `graph`, in the graph that is being traced.

    `feeds` are values of tensors by name, `variables` those of variables by the `id` of their handle; others are
    constants. Raises `UserError`, which names the operation, if one is not covered, or changes from step to step.
    """
    values: dict[str, Value] = dict(feeds)
    for outer, inner in graph.captures:
        values.setdefault(inner.name, outer if outer.dtype == tf.resource else outer.numpy())
    assigned: dict[int, Value] = dict.fromkeys(map(id, written_variables(graph)))
    return _rebuilt(graph, results, values, {**assigned, **variables}, formulas)


def _rebuilt(
    graph: Any, results: Sequence[Any], values: dict[str, Value], variables: Mapping[int, Value], formulas: Formulas
) -> list[Value]:
    """`rebuild`, where `values` has the handles of variables; those that change as no board follows are None."""
    needed = _needed(graph, results, [*values])
    for op in inputs_first(graph):
        if op.name not in needed or op.type == "Placeholder" or all(out.name in values for out in op.outputs):
            continue
        inputs = [values.get(tensor.name) for tensor in op.inputs]
        if op.type == "ReadVariableOp":
            outputs = [_read(op, inputs[0], variables)]
        elif op.type in CALLS:
            [body] = bodies(op)
            given = {tensor.name: value for tensor, value in zip(body.inputs, inputs, strict=True)}
            outputs = _rebuilt(body, body.outputs, given, variables, formulas)
        else:
            outputs = _computed(op, inputs, formulas)
        values.update(zip((tensor.name for tensor in op.outputs), outputs, strict=False))
    return [values[tensor.name] for tensor in results]


def _read(op: Any, handle: Any, variables: Mapping[int, Value]) -> Value:
    """The value of a variable: as given, else the one it has now."""
    is_assigned = any(op.inputs[0].name == tensor.name for before in op.control_inputs for tensor in before.inputs)
    if is_assigned or variables.get(id(handle), handle) is None:
        raise _refused(
            op,
            "it reads what a layer assigns at each step; a board follows that only for random numbers of Dropout, of "
            "GaussianNoise, and of layers that call keras.random.uniform or normal",
        )
    if id(handle) in variables:
        return variables[id(handle)]
    with tf.init_scope():
        return tf.raw_ops.ReadVariableOp(resource=handle, dtype=op.outputs[0].dtype).numpy()


def _computed(op: Any, inputs: list[Value], formulas: Formulas) -> list[Value]:
    """Values of the outputs of `op`."""
    if op.type in ("Identity", "StopGradient", "PreventGradient"):
        return inputs
    if op.type == "Const":
        return [tf.make_ndarray(op.get_attr("value"))]
    if op.type in ("Shape", "ShapeN"):  # shapes are known
        return [np.array(each.shape, op.outputs[0].dtype.as_numpy_dtype) for each in inputs]
    if is_stateful(op):
        raise _refused(op, "it has other results, or an effect, at each step")
    if any(out.dtype == tf.variant for out in op.outputs):
        raise _refused(op, "a board has no lists of tensors, as of a recurrent layer; give that layer unroll=True")
    try:
        if all(is_constant(value) for value in inputs):
            with tf.init_scope():
                return [result.numpy() for result in _listed(_call(op, inputs))]
        return _listed(formulas[op.type](op, *inputs) if op.type in formulas else _call(op, inputs))
    except Exception as error:  # TensorFlow raises many types
        raise _refused(op, first_line(error)) from error


def _refused(op: Any, reason: str) -> UserError:
    return UserError(f"--export: a board cannot train this network: {op.type} ({op.name}): {reason}")


def _listed(outputs: Any) -> list[Value]:
    return [*outputs] if isinstance(outputs, (list, tuple)) else [outputs]


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
