"""Two graphs of a network: that of its Keras layers, and that of the operations of a function that was traced."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from graphlib import TopologicalSorter
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import tensorflow as tf

# --- layers -----------------------------------------------------------------------------------------------------------


def functional_graph(model: Any) -> Any:
    """The object that holds the nodes of a functional or sequential model."""
    return getattr(model, "_functional", None) or model


def is_graph(layer: Any) -> bool:
    """Whether `layer` is a functional or sequential Keras model. Its graph then describes all that it computes."""
    import keras  # not at the top: figures read timing tables without TensorFlow

    is_keras_model = isinstance(layer, keras.Model) and type(layer).__module__.partition(".")[0] == "keras"
    return is_keras_model and bool(getattr(functional_graph(layer), "_nodes_by_depth", None))


def graph_nodes(model: Any) -> list[Any]:
    """The nodes of a functional or sequential model, its inputs left out."""
    nodes_by_depth = functional_graph(model)._nodes_by_depth
    return [node for nodes in nodes_by_depth.values() for node in nodes if not node.is_input]


def nested_graphs(model: Any) -> list[Any]:
    """The functional and sequential models in `model`, itself first; none if it has no graph."""
    if not is_graph(model):
        return []
    inner = {id(node.operation): node.operation for node in graph_nodes(model)}
    return [model, *itertools.chain.from_iterable(map(nested_graphs, inner.values()))]


def walk(model: Any, inputs: Sequence[Any], visit: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """Propagate one value per tensor from the inputs of a functional or sequential model to its outputs.

    `visit` maps a node and the values of its input tensors to the values of its output tensors. It is called in the
    order in which Keras runs the layers.
    """
    graph = functional_graph(model)
    values = {id(tensor): value for tensor, value in zip(graph.inputs, inputs, strict=True)}
    for depth in sorted(graph._nodes_by_depth, reverse=True):
        for node in graph._nodes_by_depth[depth]:
            if not node.is_input:
                results = visit(node, [values[id(tensor)] for tensor in node.input_tensors])
                values.update((id(tensor), value) for tensor, value in zip(node.outputs, results, strict=True))
    return [values[id(tensor)] for tensor in graph.outputs]


# --- operations -------------------------------------------------------------------------------------------------------


class TracedStep(Protocol):
    """A traced training step, as `engine.step.TrainStep` is: its graph, and what its tensors are for."""

    graph: Any
    loss: Any
    gradients: Any
    inputs: Any
    targets: Any
    folded_pairs: Any


# Operations that run other graphs -> their attributes that name these.
BRANCHES = {
    "While": ("cond", "body"),
    "StatelessWhile": ("cond", "body"),
    "If": ("then_branch", "else_branch"),
    "StatelessIf": ("then_branch", "else_branch"),
    "PartitionedCall": ("f",),
    "StatefulPartitionedCall": ("f",),
}


def inputs_first(graph: Any) -> list[tf.Operation]:
    """The operations of `graph`, each after what it depends on. As they were created, loops are not: the way back
    through a loop gives it further inputs."""
    before = {
        op.name: [*(tensor.op.name for tensor in op.inputs), *(control.name for control in op.control_inputs)]
        for op in graph.get_operations()
    }
    return [graph.get_operation_by_name(name) for name in TopologicalSorter(before).static_order()]


def needed_operations(
    results: Iterable[Any], given: Collection[str] = (), without_effect: Collection[str] = ()
) -> set[str]:
    """Names of the operations that `results` depend on, themselves included.

    Args:
        results: tensors or operations of one graph.
        given: names of tensors that are known; what they depend on is not needed for them.
        without_effect: names of operations that need not run before others which only wait for them.
    """
    waiting = [getattr(result, "op", result) for result in results]
    seen: set[str] = set()
    while waiting:
        op = waiting.pop()
        if op.name not in seen:
            seen.add(op.name)
            waiting += [tensor.op for tensor in op.inputs if tensor.name not in given]
            waiting += [before for before in op.control_inputs if before.name not in without_effect]
    return seen


def bodies(op: tf.Operation) -> Iterator[tf.Graph]:
    """The traced graphs of what a loop, a branch or a call runs; nothing for other operations."""
    for attribute in BRANCHES.get(op.type, ()):
        name, graph = op.get_attr(attribute).name, op.graph
        while graph is not None:
            function = graph._get_function(name)
            if function is not None:
                yield function.graph  # the traced graph: one rebuilt from its definition lacks shapes
                break
            graph = getattr(graph, "outer_graph", None)


def is_stateful(op: tf.Operation) -> bool:
    """Whether running `op` again may have another result or an effect. Reading a variable is not counted."""
    if op.type in BRANCHES:
        return any(is_stateful(inner) for body in bodies(op) for inner in body.get_operations())
    return bool(op.op_def.is_stateful) and op.type != "ReadVariableOp"


def written_variables(graph: Any) -> list[tf.Tensor]:
    """Handles of all variables, Keras' or not, that running `graph`, a function's graph (FuncGraph), may change."""
    used = {tensor.name for op in graph.get_operations() if is_stateful(op) for tensor in op.inputs}
    captured = [
        outside for outside, inside in graph.captures if inside.name in used and inside.dtype.name == "resource"
    ]
    return [handle for handle in captured if handle._handle_data is not None and handle._handle_data.is_set]
