"""What an operation of a traced graph needs, and what it calls."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from graphlib import TopologicalSorter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tensorflow as tf

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
