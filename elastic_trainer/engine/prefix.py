"""A training step in two parts: the frozen prefix, and the rest. The data flow of the traced step alone decides.

    prefix     what depends on the inputs and on nothing that changes: no trained variable, no random number
    cut        the tensors that pass from the prefix to the rest, each with a row for each example; their values are
               called features
    rest       the loss, the gradients and the updates, from the features and the targets. What it needs of the prefix
               that has no such rows, as the list of time steps that a recurrent layer reads, it computes again; so
               it does with what one pointwise convolution makes several times larger, as an expansion of MobileNetV2

The features of an example stay the same for as long as the same tensors train, so a run may cache them
(`engine.features`). A run that does not trains with the `TrainStep` itself. Both parts consist of that
step's operations, which TensorFlow imports into two functions: no layer is called again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from elastic_trainer.datasets.batches import Structure
from elastic_trainer.engine.step import BatchFunction, StepValues, TrainStep, as_numbers
from elastic_trainer.networks.graphs import inputs_first, is_stateful, needed_operations

CONVOLUTIONS = ("Conv2D", "MatMul", "DepthwiseConv2dNative", "Conv3D", "BatchMatMulV2")
EXPANSION = 2  # of what is computed again in each step: so many times larger than what it is made of


class Cut(NamedTuple):
    """Where a step is cut: `tensors` of its graph, at least one, behind the operations with the names `within`."""

    tensors: list[tf.Tensor]
    within: set[str]


class SplitStep:
    """A training step, or another function of a batch, cut in two; the rest has its effects, such as to train.

    Attributes:
        results: (features, targets, weights) -> what the whole returns for a batch.
    """

    def __init__(self, step: BatchFunction, cut: Cut) -> None:
        graph, (tensors, within) = step.graph, cut
        names = [tensor.name for tensor in tensors]
        effects = [op for op in graph.control_outputs if op.name not in within]  # such as the updates
        inputs, targets = ([tensor.name for tensor in part] for part in (step.inputs, step.targets))

        def prefix(values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            return _imported(graph, dict(zip(inputs, values, strict=True)), tensors, (), within)

        def rest(features: Sequence[tf.Tensor], *more: Structure) -> Structure:
            values = [value for value in tf.nest.flatten(more) if value is not None]
            feeds = dict(zip([*names, *targets], [*features, *values], strict=True))
            return step.packed(_imported(graph, feeds, graph.outputs, effects, within))

        def traced(function: Callable[..., Any], *specs: Any) -> Any:
            return tf.function(function, autograph=False).get_concrete_function(*specs)

        self._rows = None
        self._prefix = traced(prefix, [tf.TensorSpec((None, *each.shape[1:]), each.dtype) for each in step.inputs])
        # The batch size may be baked into a shape.
        if any(value.shape.rank and value.shape[0] for value in self._prefix.outputs):
            self._rows = step.inputs[0].shape[0]
            self._prefix = traced(prefix, [tf.TensorSpec(each.shape, each.dtype) for each in step.inputs])
        self.results: Callable[[Sequence[tf.Tensor], Structure, Structure], Any]
        features = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]
        self.results = traced(rest, features, *step.signature[1:])
        self.graph: tf.Graph = self.results.graph  # type: ignore[attr-defined]  # of the rest

    def prefix(self, inputs: Structure) -> list[tf.Tensor]:
        """The features of examples, any number of them: each [examples, …], in the order of the cut tensors."""
        values = tf.nest.flatten(inputs)
        if self._rows is None:
            return self._prefix(values)
        count, rows = len(values[0]), self._rows
        filled = [tf.concat([each, tf.repeat(each[-1:], -count % rows, axis=0)], axis=0) for each in values]
        parts = [self._prefix([each[start : start + rows] for each in filled]) for start in range(0, count, rows)]
        return [tf.concat(values, axis=0)[:count] for values in zip(*parts, strict=True)]

    def __call__(self, features: Sequence[tf.Tensor], targets: Structure, weights: Structure = None) -> StepValues:
        """Train on one batch; blocks until the device finishes."""
        return as_numbers(*self.results([*features], targets, weights))


def find_cut(step: BatchFunction) -> Cut | None:
    """The cut behind the largest prefix; None if no weights are frozen before the first trained ones."""
    within = prefix_operations(step)
    passing, operations = _passing(step, within), step.graph.get_operations()
    kept = {tensor.name: tensor for op in operations for tensor in op.outputs if tensor.name in passing}
    if all(tensor.shape[1:].is_fully_defined() for tensor in kept.values()):
        for name in sorted(kept, key=lambda name: -_values(kept[name])):  # of equal ones the earlier first
            if _is_expansion(kept[name], within, kept):
                del kept[name]
    captured = {inner.op.name for _, inner in step.graph.captures}  # variables, and constants that were made from them
    return Cut([*kept.values()], within) if captured & needed_operations(kept.values()) else None


def split_step(step: TrainStep) -> SplitStep | None:
    """`step` cut as by `find_cut`, or None."""
    cut = find_cut(step)
    return None if cut is None else SplitStep(step, cut)


def prefix_operations(step: BatchFunction) -> set[str]:
    """Names of the operations of a step that depend on the inputs and on nothing that changes.

    Random numbers and all other stateful operations change; so does each variable that the step writes.
    """
    graph = step.graph
    operations = inputs_first(graph)
    stateful = [op for op in operations if is_stateful(op)]
    trained = {id(variable.value.handle) for variable in step.variables}
    written = {inner.name for outer, inner in graph.captures if id(outer) in trained}
    written |= {tensor.name for op in stateful for tensor in op.inputs if tensor.dtype == tf.resource}
    found = {tensor.op.name for tensor in step.inputs}
    changing = {*(tensor.op.name for tensor in step.targets), *(op.name for op in stateful)}
    for op in operations:
        before = {*(tensor.op.name for tensor in op.inputs), *(control.name for control in op.control_inputs)}
        if op.name in changing or before & changing or any(tensor.name in written for tensor in op.inputs):
            changing.add(op.name)
        elif before & found:
            found.add(op.name)
    return found


def _passing(step: BatchFunction, prefix: set[str]) -> set[str]:
    """Names of the tensors of `prefix` with a row for each example that the rest needs for the results of the step."""
    graph, counts = step.graph, (step.inputs[0].shape[0], None)
    needed = needed_operations([*graph.outputs, *graph.control_outputs])
    beyond = (op for op in graph.get_operations() if op.name in needed and op.name not in prefix)
    waiting = [tensor for op in beyond for tensor in op.inputs]
    seen: set[str] = set()
    passing: set[str] = set()
    while waiting:
        tensor = waiting.pop()
        if tensor.name in seen or tensor.op.name not in prefix:
            continue
        seen.add(tensor.name)
        rank = tensor.shape.rank
        if tensor.dtype != tf.variant and (rank is None or (rank > 0 and tensor.shape[0] in counts)):
            passing.add(tensor.name)
        else:
            waiting += tensor.op.inputs
    return passing


def _values(tensor: Any) -> Any:
    """How many values `tensor` has for each example."""
    return tensor.shape[1:].num_elements()


def _is_expansion(tensor: Any, prefix: set[str], passing: Collection[str]) -> bool:
    """Whether the other tensors that pass give `tensor` by one pointwise convolution, and are much smaller.

    Computed in each step, it takes about the time of reading it from the features, and none of their room.
    """
    waiting, sources, convolutions = [tensor.op], dict[str, int](), 0
    for op in waiting:  # which grows
        convolutions += op.type in CONVOLUTIONS
        if not op.inputs or (op.type in CONVOLUTIONS and op.inputs[1].shape[:-2].num_elements() != 1):
            return False
        for each in op.inputs:
            if each.name in passing and each is not tensor:
                sources[each.name] = _values(each)
            elif each.op.name in prefix and each.op not in waiting:
                waiting.append(each.op)
    return convolutions == 1 and _values(tensor) >= EXPANSION * sum(sources.values())


def _imported(
    graph: Any,
    feeds: Mapping[str, tf.Tensor],
    results: Sequence[tf.Tensor],
    effects: Iterable[Any],
    without_effect: Collection[str],
) -> list[tf.Tensor]:
    """Import into the function that is being traced what `results` and `effects` need of `graph`, a FuncGraph.

    `feeds` take the place of its tensors, by name; `without_effect` as of `needed_operations`.
    """
    needed = needed_operations([*results, *effects], feeds, without_effect)
    captured = [(outer, inner) for outer, inner in graph.captures if inner.op.name in needed]
    complete, part = graph.as_graph_def(), tf.compat.v1.GraphDef()
    for node in complete.node:
        if node.name in needed and node.op != "Placeholder":
            part.node.add().CopyFrom(node)
            inputs = [name for name in node.input if name[0] != "^" or name[1:] in needed]
            part.node[-1].input[:] = inputs
    part.versions.CopyFrom(complete.versions)
    part.library.CopyFrom(complete.library)
    here = tf.compat.v1.get_default_graph()
    values = {inner.name: here.capture(outer) for outer, inner in captured}
    read = {name if ":" in name else f"{name}:0" for node in part.node for name in node.input}
    values |= {name: value for name, value in feeds.items() if name in read}  # TensorFlow refuses others
    names = [tensor.name for tensor in results if tensor.name not in feeds]
    imported = iter(tf.graph_util.import_graph_def(part, input_map=values, return_elements=names, name=""))
    for function in complete.library.function:  # traced loops and branches, since imported ones have no shapes
        traced = graph._get_function(function.signature.name)
        if traced is not None:
            here._add_function_recursive(traced, overwrite=True)
    return [feeds[tensor.name] if tensor.name in feeds else next(imported) for tensor in results]
