"""Memory: what training takes, by how deep its steps reach (`system.memory_budget`: what it may take).

What the forward pass writes stays in memory until the last gradient operation that reads it has run, and all of it is
there when the backward pass starts. So steps whose deepest tensor is the k-th in backward order take at most

    MARGIN · (START_MB + OPERATION_MB · operations + FILTERS_FACTOR · filters + TRAINED_FACTOR · trained
              + max(forward, kept + result) + 2 · inputs)

    operations   of the backward pass, and three times those of the forward pass: of the step, of the first model, and
                 of validation; without those that depend on weights alone
    filters      MB of convolutions: step and validation have them with batch norm folded in, oneDNN in another order
    trained      MB of the tensors down to the k-th, for the optimizer's variables
    forward      inputs and results of the largest operation of the forward pass
    kept         results of the forward pass that gradients down to the k-th tensor read
    result       the largest of the backward pass
    inputs       of a batch; two are made ahead

No rule looks at a layer. The first line has the same size for any batch. The second line grows with its examples. The
numbers are fitted to peaks of fresh processes (scripts/benchmarks/benchmark_memory.py, docs/log/memory.md). The paper
does not cover memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from elastic_trainer.networks.graphs import inputs_first, needed_operations
from elastic_trainer.system.memory_budget import StepMemory

if TYPE_CHECKING:
    from elastic_trainer.engine.step import TrainStep

MARGIN = 1.2
START_MB, OPERATION_MB, FILTERS_FACTOR, TRAINED_FACTOR = 20.0, 0.04, 3.0, 1.0
SUM_OPERATIONS = 6  # of each tensor: its sum of gradients is added to, read and set to 0
_GIVEN = {"Const", "Placeholder"}
_CONVOLUTIONS = {"Conv2D", "Conv3D", "DepthwiseConv2dNative"}
# Their result is their first input.
_ALIASES = {"Identity", "IdentityN", "Reshape", "Squeeze", "ExpandDims", "ReadVariableOp", "StopGradient"}


def step_memory(step: TrainStep, places: Mapping[str, int] | None = None, order: Iterable[Any] = ()) -> StepMemory:
    """What a traced step takes, or any step that trains some of its tensors. Tensors of unknown shape count as nothing.

    Args:
        step: on a batch of known size.
        places: by the name of an operation, for which tensor of the backward order it runs first, counted from 0; -1:
            whatever trains (`Attribution.places`). By default there is one depth, that of `step`.
        order: with `places`, indices [N] into `step.variables` in backward order.
    """
    needed = needed_operations([*step.graph.outputs, *step.graph.control_outputs])  # TensorFlow leaves out all others
    forward, places = needed_operations([step.loss]), places or {}
    from_inputs, filters_mb, forward_mb, forward_count = {tensor.op.name for tensor in step.inputs}, 0.0, 0.0, 0
    trained_mb = np.cumsum([variables_mb([step.variables[k]]) for k in order] or [variables_mb(step.variables)])
    operations, kept_mb, result_mb = np.zeros((3, len(trained_mb)))
    readers = dict[str, tuple[int, float]]()  # of results of the forward pass: the first place, and MB
    for op in inputs_first(step.graph):
        if op.name not in needed or op.type in _GIVEN:
            continue
        place, read = max(places.get(op.name, 0), 0), [*map(_source, op.inputs)]
        written = [0.0] if op.type in _ALIASES else [*map(_size_mb, op.outputs)]
        filters_mb += _size_mb(op.inputs[1]) if op.type in _CONVOLUTIONS else 0.0
        if not from_inputs.isdisjoint(tensor.op.name for tensor in op.inputs):
            from_inputs.add(op.name)
            forward_count += op.name in forward
        if op.name in forward:  # without an input, it is done before where its weights do not train
            forward_mb = max(forward_mb, sum(written) + sum(map(_size_mb, read)))
            continue
        operations[place] += 1
        result_mb[place] = max([result_mb[place], *written])
        for tensor in read:
            if tensor.op.name in forward and tensor.op.name in from_inputs and tensor.op.type not in _GIVEN:
                readers[tensor.name] = min(place, readers.get(tensor.name, (place, 0.0))[0]), _size_mb(tensor)
    for place, megabytes in readers.values():
        kept_mb[place] += megabytes
    fixed_mb = START_MB + OPERATION_MB * (np.cumsum(operations) + 3 * forward_count)
    fixed_mb += FILTERS_FACTOR * filters_mb + TRAINED_FACTOR * trained_mb
    by_rows_mb = np.maximum(np.cumsum(kept_mb) + np.maximum.accumulate(result_mb), forward_mb)
    by_rows_mb += 2 * sum(map(_size_mb, step.inputs))
    sum_operations = SUM_OPERATIONS * (np.arange(1, len(trained_mb) + 1) if places else len(step.variables))
    if step.update is not None:  # a graph of its own, with the optimizer's operations
        sum_operations = sum(op.type not in _GIVEN for op in step.update.graph.get_operations())
    sums_mb = trained_mb + MARGIN * OPERATION_MB * sum_operations
    return StepMemory(int(step.inputs[0].shape[0]), MARGIN * fixed_mb, MARGIN * by_rows_mb, sums_mb)


def variables_mb(variables: Iterable[Any]) -> float:
    """What variables take, in MB."""
    import tensorflow as tf

    return sum(prod(variable.shape) * tf.as_dtype(variable.dtype).size for variable in variables) / 1e6


def _size_mb(tensor: Any) -> float:
    """MB of a symbolic tensor; 0 if its shape is not known, and of what is no array."""
    if tensor.dtype.name in ("resource", "variant", "string") or not tensor.shape.is_fully_defined():
        return 0.0
    return float(prod(tensor.shape.as_list()) * tensor.dtype.size) / 1e6


def _source(tensor: Any) -> Any:
    """The tensor whose memory `tensor` shares."""
    while tensor.op.type in _ALIASES and tensor.op.inputs:
        tensor = tensor.op.inputs[0]
    return tensor
