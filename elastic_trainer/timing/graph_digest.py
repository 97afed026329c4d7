"""A digest of what a network computes, which the user's code may change without another shape of a weight.

Names, seeds, weights and constants do not count; kinds of operations, their options, shapes and data flow do.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from elastic_trainer.networks.graphs import bodies, inputs_first

if TYPE_CHECKING:
    from elastic_trainer.engine.task import Task

# Attributes of a process, and seeds.
_IGNORED = ("container", "shared_name", "debug_name", "token", "config_proto", "seed", "seed2")


def graph_digest(task: Task, batch_size: int | None) -> str:
    """Digest of the traced forward pass of a network in training, as steps compute it; the same in every process.

    The loss is left out: TensorFlow computes it by other operations if it is to be deterministic.
    """
    import tensorflow as tf

    from elastic_trainer.networks.batch_norm_folding import folded_batch_norm

    def forward(inputs: Any) -> list[tf.Tensor]:
        with folded_batch_norm(task.model, ()):  # half of the time of a trace in which all may train
            return [*tf.nest.flatten(task.outputs(inputs, training=True)), *task.model.losses]

    inputs, _, _ = task.signature(batch_size)
    return _digest(tf.function(forward, autograph=False).get_concrete_function(inputs).graph)[:16]


def _digest(graph: Any) -> str:
    """Digest of what the outputs of `graph`, a function's graph (FuncGraph), depend on."""
    digests: dict[str, str] = {}
    for op in inputs_first(graph):
        inputs = [(digests[tensor.op.name], tensor.value_index) for tensor in op.inputs]
        outputs = [(str(tensor.shape), tensor.dtype.name) for tensor in op.outputs]
        digests[op.name] = _hash((op.type, _options(op), inputs, outputs, [_digest(body) for body in bodies(op)]))
    return _hash([(digests[tensor.op.name], tensor.value_index) for tensor in graph.outputs])


def _hash(parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _options(op: Any) -> list[tuple[str, bytes]]:
    """The attributes of an operation that say what it computes, such as its strides; of a constant none."""
    if op.type == "Const":
        return []
    return [
        (name, value.SerializeToString(deterministic=True))
        for name, value in sorted(op.node_def.attr.items())
        if not name.startswith("_") and name not in _IGNORED and not value.HasField("func")
    ]
