"""A file that trains in the TensorFlow that a board has: train.pb, a GraphDef of the signatures of `board.signatures`.

A SavedModel of today does not load in TensorFlow 2.6 or 2.7, since it has operations that came later; a GraphDef of
operations that those have does. Each signature is a part of one graph: `NAME/ARGUMENT` are its placeholders,
`NAME/result/KEY` what it returns. The variables stay on the device between calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import tensorflow as tf

from elastic_trainer.system.errors import UserError

OPERATIONS = Path(__file__).with_name("tensorflow_2.6_operations.txt")  # a line each: its name and its attributes
HINTS = ("validate_shape", "grad_a", "grad_b", "grad_x", "grad_y")  # attributes without effect on a result
PRODUCER = 808  # version of the GraphDefs of TensorFlow 2.6, which warns of later ones


def graph_file(functions: Mapping[str, Any]) -> bytes:
    """The file of traced functions, by the names of their signatures; they may share variables.

    Raises `UserError`, which names the operation, if TensorFlow 2.6 lacks one or one of its attributes.
    """
    with tf.Graph().as_default() as graph:
        handles: dict[int, tf.Tensor] = {}
        for name, function in functions.items():
            for outer, _ in function.graph.captures:  # variables alone: `rebuild` leaves no other
                if id(outer) not in handles:
                    handles[id(outer)] = _variable(outer, f"variable_{len(handles)}")
            effects = [op.name for op in function.graph.control_outputs]
            found = tf.graph_util.import_graph_def(
                function.graph.as_graph_def(),
                {inner.name: handles[id(outer)] for outer, inner in function.graph.captures},
                [*effects, *(tensor.name for tensor in function.graph.outputs)],
                name=name,
            )
            results = zip(sorted(function.structured_outputs), found[len(effects) :], strict=True)
            with tf.control_dependencies(found[: len(effects)]):
                for key, value in results:
                    tf.identity(value, f"{name}/result/{key}")
    definition = graph.as_graph_def()
    # What the variables were captured by is left without a use.
    nodes = [node for node in definition.node if not _is_captured(node)]
    del definition.node[:]
    definition.node.extend(nodes)
    for node in definition.node:
        _make_portable(node, graph.get_operation_by_name(node.name).op_def)
    if definition.library.function:
        raise UserError("--export: the step has a loop or a condition, which the file cannot have")
    definition.versions.producer = PRODUCER
    content: bytes = definition.SerializeToString()
    return content


def _variable(handle: Any, name: str) -> tf.Tensor:
    """A variable of the file in the place of an eager one."""
    [data] = handle._handle_data.shape_and_type  # a handle has no public type and shape
    return tf.raw_ops.VarHandleOp(dtype=data.dtype, shape=tf.TensorShape(data.shape), shared_name=name, name=name)


def _is_captured(node: Any) -> bool:
    return node.op == "Placeholder" and node.attr["dtype"].type == tf.resource.as_datatype_enum


@cache
def _known() -> dict[str, list[str]]:
    """The attributes of each operation of TensorFlow 2.6."""
    lines = OPERATIONS.read_text(encoding="utf-8").splitlines()
    return {words[0]: words[1:] for words in map(str.split, lines)}


def _make_portable(node: Any, definition: Any) -> None:
    """Remove attributes that came later and mean what was so before. Raises as `graph_file`."""
    lacking = "--export: TensorFlow 2.6 has no"
    if node.op not in _known():
        raise UserError(f"{lacking} operation {node.op} ({node.name})")
    for attribute in definition.attr:
        name = attribute.name
        if name in node.attr and name not in _known()[node.op]:
            if name not in HINTS and node.attr[name] != attribute.default_value:
                raise UserError(f"{lacking} attribute {name} of {node.op} ({node.name})")
            del node.attr[name]
