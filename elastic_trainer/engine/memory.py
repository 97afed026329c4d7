"""Memory: what training takes, by how deep its steps reach, and what the process may take while it trains.

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

import math
from collections.abc import Callable, Iterable, Mapping
from math import inf, prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from elastic_trainer.datasets.batches import part_rows
from elastic_trainer.networks.graphs import inputs_first, needed_operations
from elastic_trainer.system.errors import UserError
from elastic_trainer.system.machine import available_memory_mb, has_gpu, reachable_memory_mb, release_memory
from elastic_trainer.system.memory import resident_memory_mb

if TYPE_CHECKING:
    from elastic_trainer.engine.step import TrainStep

MARGIN = 1.2
START_MB, OPERATION_MB, FILTERS_FACTOR, TRAINED_FACTOR = 20.0, 0.04, 3.0, 1.0
SUM_OPERATIONS = 6  # of each tensor: its sum of gradients is added to, read and set to 0
_GIVEN = {"Const", "Placeholder"}
_CONVOLUTIONS = {"Conv2D", "Conv3D", "DepthwiseConv2dNative"}
# Their result is their first input.
_ALIASES = {"Identity", "IdentityN", "Reshape", "Squeeze", "ExpandDims", "ReadVariableOp", "StopGradient"}
MEMORY_SHARE = 0.98  # of what there is, for selections: a traced step may take a little more than its depth says
NOTHING_FITS = "no batch fits; choose a smaller --input_size or network"
SPARE_FACTOR = 1.02  # of a named limit: what a process takes before it trains varies

Needed = Callable[[int, int], float]  # MB that training takes, by the size of a batch and of its parts at most


class StepMemory(NamedTuple):
    """MB that training takes beyond what the process has before; entry k - 1 of arrays [N] is of depth k.

    Attributes:
        rows: examples of the step that was traced.
        fixed_mb: with any batch.
        by_rows_mb: what those examples take.
        sums_mb: sums of gradients and the operations that add them up, where a batch is taken in parts.
    """

    rows: int
    fixed_mb: np.ndarray
    by_rows_mb: np.ndarray
    sums_mb: np.ndarray

    def needed_mb(self, batch_size: int, micro_batch: int | None = None) -> np.ndarray:
        """MB [N] of training on batches of this size, in parts of at most `micro_batch` examples."""
        rows = part_rows(batch_size, micro_batch)
        return self.fixed_mb + self.by_rows_mb * rows / self.rows + self.sums_mb * (rows < batch_size)

    def to_record(self) -> dict[str, Any]:
        """All of it in JSON's types."""
        return {name: np.asarray(value).tolist() for name, value in self._asdict().items()}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> StepMemory:
        """What `to_record` returned."""
        return cls(record["rows"], *(np.array(record[name]) for name in cls._fields[1:]))


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


class MemoryBudget:
    """The memory of the process while it trains: what it takes before, and the room that a limit leaves.

    Args:
        limit_mb: what the process may take in all, resident; None: what the machine has. As an attribute, infinity.

    Raises:
        UserError: a limit is given and nothing here can keep to one.
    """

    def __init__(self, limit_mb: float | None = None) -> None:
        if limit_mb is not None and not _is_reported():
            raise UserError("--memory: needs a system that reports the memory of a process, and no GPU; leave it out")
        self.limit_mb = inf if limit_mb is None else limit_mb
        self._start_mb: float | None = None

    @property
    def has_limit(self) -> bool:
        """Whether there is another limit than the machine's."""
        return self.limit_mb < inf

    @property
    def total_mb(self) -> float:
        """What the process may take in all; infinity where memory is not reported, or that of a GPU."""
        return min(self.limit_mb, reachable_memory_mb()) if _is_reported() else inf

    @property
    def start_mb(self) -> float | None:
        """What the process takes before it trains, or now until `start`; None if the system does not report it."""
        return resident_memory_mb() if self._start_mb is None else self._start_mb

    @property
    def room_mb(self) -> float:
        """What training may take."""
        return self.total_mb - (self.start_mb or 0.0)

    @property
    def left_mb(self) -> float:
        """What the process may take now, beyond what it has."""
        return self.total_mb - (resident_memory_mb() or 0.0)

    def start(self) -> None:
        """Training starts now: the process has taken what it takes before."""
        release_memory()  # of what was traced and measured: training takes it again
        self._start_mb = resident_memory_mb()

    def needed_mb(self, training_mb: float) -> float:
        """What the process takes in all where training takes `training_mb`."""
        return (self.start_mb or 0.0) + training_mb

    def fits(self, training_mb: float) -> bool:
        """Whether training may take `training_mb`."""
        return training_mb <= self.room_mb

    def deepest(self, needed_mb: np.ndarray) -> int:
        """How many of the depths fit whose training takes `needed_mb` [N], ascending, with a little to spare."""
        return int((needed_mb <= MEMORY_SHARE * self.total_mb - (self.start_mb or 0.0)).sum())

    def fitting_size(self, needed: Callable[[int], float], batch_size: int) -> int | None:
        """The largest of a batch, its half, quarter, … that fits, or None; `needed` is MB by its size."""
        sizes = [batch_size >> k for k in range(batch_size.bit_length())]
        return next((size for size in sizes if self.fits(needed(size))), None)

    def refuse(
        self,
        what: str,
        needed: Needed,
        batch_size: int,
        micro_batch: int | None = None,
        can_split: bool = False,
        others: Iterable[str] = (),
        beside: str = "",
    ) -> UserError:
        """The error for `what`, in words, which takes more than there is. It names what fits.

        Args:
            needed: of `what`, by the size of a batch and of its parts.
            can_split: whether a batch can be taken in (smaller) parts.
            others: flags that fit as well.
            beside: words for what a larger limit must hold, too.
        """
        rows = part_rows(batch_size, micro_batch)
        needed_mb, fits = needed(batch_size, rows), list[str]()
        part = self.fitting_size(lambda size: needed(batch_size, size), rows) if can_split else None
        fits += [f"--micro_batch {part}"] if part else []
        size = self.fitting_size(lambda size: needed(size, rows), batch_size)
        fits += [f"--batch_size {size}"] if size else []
        if self.has_limit and self.needed_mb(needed_mb) <= reachable_memory_mb():
            fits.append(f"--memory {math.ceil(SPARE_FACTOR * self.needed_mb(needed_mb) / 10) * 10}M{beside}")
        fits += others
        advice = f"what fits: {', or '.join(fits)}" if fits else NOTHING_FITS
        taken = f" (limit {self.limit_mb:,.0f} MB, taken {self.start_mb or 0.0:,.0f} MB)" if self.has_limit else ""
        return UserError(
            f"memory: {what} takes about {needed_mb:,.0f} MB more, and {max(self.room_mb, 0):,.0f} MB are available"
            f"{taken}; {advice}"
        )


def _is_reported() -> bool:
    """Whether the system reports the memory that training takes; not of a GPU, which has its own."""
    return available_memory_mb() is not None and not has_gpu()
