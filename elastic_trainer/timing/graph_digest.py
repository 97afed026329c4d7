"""Digests of what a network computes, which the user's code may change without another shape of a weight.

Names, seeds and weights do not count; kinds of operations, their options, shapes and data flow do. Constants, such as
the scaling of images, count for the results of a network, and not for its times.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from elastic_trainer.networks.graphs import bodies, inputs_first

if TYPE_CHECKING:
    from elastic_trainer.task import Task

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


def network_digest(task: Task, training: bool) -> str:
    """Digest of all that decides what a network returns but the values of its weights: also constants.

    It is the same in every process with the same versions, precision and kind of device. In `training`, losses that
    layers add count, too.
    """
    import tensorflow as tf

    def forward(inputs: Any) -> list[tf.Tensor]:
        return [*tf.nest.flatten(task.outputs(inputs, training=training)), *(task.model.losses if training else ())]

    inputs, _, _ = task.signature(None)
    graph = tf.function(forward, autograph=False).get_concrete_function(inputs).graph
    places = {id(variable.value.handle): place for place, variable in enumerate(task.model.variables)}
    given = {inside.op.name: places.get(id(outside), _value(outside)) for outside, inside in graph.captures}
    return _digest(graph, given)[:16]


def _value(tensor: Any) -> bytes | None:
    """The content of a tensor that code of the user made outside of a graph; None for a variable of no layer."""
    return None if tensor.dtype.name == "resource" else tensor.numpy().tobytes()


def _digest(graph: Any, given: Mapping[str, object] | None = None) -> str:
    """Digest of what the outputs of `graph`, a function's graph (FuncGraph), depend on.

    `given` stands for variables and tensors from outside, by the names of their placeholders; with it, constants count.
    """
    digests: dict[str, str] = {}
    for op in inputs_first(graph):
        inputs = [(digests[tensor.op.name], tensor.value_index) for tensor in op.inputs]
        outputs = [(str(tensor.shape), tensor.dtype.name) for tensor in op.outputs]
        inner = [_digest(body, None if given is None else {}) for body in bodies(op)]
        parts = [op.type, _options(op, given is not None), inputs, outputs, inner]
        digests[op.name] = _hash((*parts, *([given[op.name]] if given and op.name in given else ())))
    return _hash([(digests[tensor.op.name], tensor.value_index) for tensor in graph.outputs])


def _hash(parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _options(op: Any, constants: bool) -> list[tuple[str, bytes]]:
    """The attributes of an operation that say what it computes, such as its strides, and the value of a constant."""
    if op.type == "Const" and not constants:
        return []
    return [
        (name, value.SerializeToString(deterministic=True))
        for name, value in sorted(op.node_def.attr.items())
        if not name.startswith("_") and name not in _IGNORED and not value.HasField("func")
    ]
