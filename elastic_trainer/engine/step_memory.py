"""How much memory a traced step takes, by its data flow alone: no rule looks at a layer.

The step's operations are simulated in TensorFlow's order (`memory_simulation`). A result takes memory until its last
reader is done. To that is added what TensorFlow takes for each operation of a graph, for each MB of filters (oneDNN
stores them in another order), and for each MB that trains (the optimizer's variables, first written in a step):

    START_MB + OPERATION_MB · operations + TENSORS_FACTOR · tensors + FILTERS_FACTOR · filters
    + TRAINED_FACTOR · trained

The numbers are fitted to the peaks of fresh processes (scripts/benchmarks/benchmark_memory.py; docs/log/memory.md says
how far they are off, and what else was compared).
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from elastic_trainer.engine.memory_simulation import size_of, touched_bytes
from elastic_trainer.networks.graphs import needed_operations

if TYPE_CHECKING:
    import tensorflow as tf

START_MB, OPERATION_MB, TENSORS_FACTOR, FILTERS_FACTOR, TRAINED_FACTOR = 25.0, 0.02, 1.08, 1.5, 0.6
NOT_REUSED = 0.3  # of what a forward pass writes, where a step has freed memory of other sizes
_CONVOLUTIONS = {"Conv2D", "Conv3D", "DepthwiseConv2dNative"}


class StepMemory(NamedTuple):
    """What a step takes beyond what was there before it was traced."""

    tensors_mb: float  # what its operations write
    operations: int
    filters_mb: float  # of its convolutions
    trained_mb: float  # of the variables that train

    @property
    def fixed_mb(self) -> float:
        """What does not depend on the batch."""
        weights_mb = FILTERS_FACTOR * self.filters_mb + TRAINED_FACTOR * self.trained_mb
        return START_MB + OPERATION_MB * self.operations + weights_mb

    @property
    def megabytes(self) -> float:
        """All of it, as in the module's header."""
        return self.fixed_mb + TENSORS_FACTOR * self.tensors_mb


def step_memory(graph: tf.Graph, trained: Iterable[Any]) -> StepMemory:
    """What running the traced function of `graph`, which trains the variables `trained`, takes.

    Tensors whose shape is not known count as nothing.
    """
    return _memory(graph, [*graph.outputs, *graph.control_outputs], variables_mb(trained))


def forward_memory(graph: tf.Graph, loss: tf.Tensor) -> StepMemory:
    """As `step_memory`, of the forward pass alone: what the `loss` of a step needs."""
    return _memory(graph, [loss], 0.0)


def training_mb(step: Any) -> tuple[float, StepMemory]:
    """MB that training with a `engine.step.TrainStep` takes in all, features aside; and its forward pass.

    Of a step in parts of a batch, the sums of gradients and the graph of the update come to a part.
    """
    forward = forward_memory(step.graph, step.loss)
    needed_mb = step_memory(step.graph, step.variables).megabytes + beside_steps_mb(forward, step.inputs)
    if step.update is not None:
        needed_mb += variables_mb(step.accumulators) + OPERATION_MB * len(step.update.graph.get_operations())
    return needed_mb, forward


def split_graph_mb(forward: StepMemory) -> float:
    """MB that cached features take beside themselves: the graphs of the step and of validation, cut in two."""
    return 4 * OPERATION_MB * forward.operations


def beside_steps_mb(forward: StepMemory, inputs: Iterable[Any]) -> float:
    """MB that a run takes beside its steps: the first model and validation, whose graphs are those of forward passes,
    and two batches of symbolic tensors `inputs`, which are made ahead."""
    graphs_mb = 2 * OPERATION_MB * forward.operations
    return graphs_mb + NOT_REUSED * forward.tensors_mb + 2 * sum(map(size_of, inputs)) / 1e6


def variables_mb(variables: Iterable[Any]) -> float:
    """What variables take, in MB."""
    import tensorflow as tf

    return sum(prod(variable.shape) * tf.as_dtype(variable.dtype).size for variable in variables) / 1e6


def _memory(graph: tf.Graph, results: list[Any], trained_mb: float) -> StepMemory:
    needed = needed_operations(results)  # TensorFlow leaves out all others, such as gradients of what does not train
    operations = [op for op in graph.get_operations() if op.name in needed]
    filters = sum(size_of(op.inputs[1]) for op in operations if op.type in _CONVOLUTIONS)
    stays = [result for result in results if hasattr(result, "op")]  # the others are operations
    return StepMemory(touched_bytes(operations, stays) / 1e6, len(operations), filters / 1e6, trained_mb)
