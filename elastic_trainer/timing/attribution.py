"""Attribution: operation times are given to tensors by the data flow of the traced step alone (paper section 5).

    F     the operations the loss depends on
    B_k   the operations the gradient of tensor k depends on, less F
    order by depth, output first: operations of B_k shared with others ascending, then |B_k|; among equals the tensor
        created later comes first
    t_dw  operations of B_k in no other B_j, and the update of tensor k
    t_dy  operations of B_k shared with others, if k is the first in the order to need them
    t_fw  operations of F that depend on the inputs, on k, and on no tensor before it in the order

A step that trains down to tensor k recomputes t_fw of all tensors up to k. The frozen prefix, the operations of F that
depend on the inputs and on none of these tensors, is t_fw of the deeper tensors and the preprocessing, and can be
computed once. What is random, or follows a variable that the step writes, is never part of it and belongs to no tensor.
Nor does what needs no input, such as a regulariser, or a folded kernel.

Where batch norm is folded, the tensors of a pair share operations that pass nothing on to deeper tensors. They count in
t_dw of one of these tensors (`Pair.tensors`). A pair whose gamma trains without its kernel cannot be folded, and no
operation of the full step tells what its batch norm then takes. So the Tensor Selector trains such a gamma only with
its kernel (`selection.select`).

The sum of t_dy down to the deepest selected tensor plus t_dw of the selected ones is therefore never below the time of
the operations really needed. The paper has rules by layer type; here no rule looks at a layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from elastic_trainer.networks.graphs import inputs_first, is_stateful

if TYPE_CHECKING:
    import keras

    from elastic_trainer.networks.graphs import TracedStep


class OperationTimes(NamedTuple):
    """Times of operations in ms, added up by what they belong to; arrays [N] are in backward order.

    Attributes:
        t_dw_ms, t_dy_ms, t_fw_ms: as in the module's header; update_ms is the part of t_dw_ms that applies the update.
        preprocessing_ms: operations of F that depend on the inputs alone, such as rescaling them.
        forward_ms, other_ms: operations the loss needs, and those of no tensor (metrics, the schedule).
    """

    t_dw_ms: np.ndarray
    t_dy_ms: np.ndarray
    t_fw_ms: np.ndarray
    update_ms: np.ndarray
    preprocessing_ms: float
    forward_ms: float
    other_ms: float


@dataclass(frozen=True)
class Attribution:
    """Which tensor each operation of a full step belongs to, by data flow; arrays [N] are in backward order.

    Attributes:
        positions: index into `model.trainable_variables` of each tensor of the backward order.
        kernels: int [N], of the gamma of a folded pair the place of its kernel in the backward order, else -1.
        features_mb: what passes from the frozen prefix to the rest of a step that trains down to each tensor, in MB.
        operations: names; the arrays below have an entry for each.
        own, shared, update, recomputed: place of the tensor whose t_dw, t_dy, update or t_fw an operation is part of;
            -1: of none.
        in_forward, in_preprocessing, in_other: bool.
        places: by name, the place of the first tensor whose training an operation runs for; -1: it always runs.
    """

    positions: np.ndarray
    kernels: np.ndarray
    features_mb: np.ndarray
    operations: list[str]
    own: np.ndarray
    shared: np.ndarray
    update: np.ndarray
    recomputed: np.ndarray
    in_forward: np.ndarray
    in_preprocessing: np.ndarray
    in_other: np.ndarray
    places: dict[str, int]

    def times(self, op_ms: Mapping[str, float]) -> OperationTimes:
        """The times of operations, by name, added up; those without one take none."""
        ms = np.array([op_ms.get(name, 0.0) for name in self.operations])

        def of_tensors(places: np.ndarray) -> np.ndarray:
            has_place = places >= 0
            return np.bincount(places[has_place], ms[has_place], len(self.positions))

        update_ms = of_tensors(self.update)
        return OperationTimes(
            t_dw_ms=of_tensors(self.own) + update_ms,
            t_dy_ms=of_tensors(self.shared),
            t_fw_ms=of_tensors(self.recomputed),
            update_ms=update_ms,
            preprocessing_ms=float(ms[self.in_preprocessing].sum()),
            forward_ms=float(ms[self.in_forward].sum()),
            other_ms=float(ms[self.in_other].sum()),
        )


def attribute(step: TracedStep, variables: Sequence[keras.Variable]) -> Attribution:
    """Give each operation of a step that trains all of `variables` to a tensor, by data flow."""
    operations, count = inputs_first(step.graph), len(variables)
    number = {op.name: i for i, op in enumerate(operations)}
    before = [
        sorted({number[t.op.name] for t in op.inputs} | {number[c.name] for c in op.control_inputs})
        for op in operations
    ]
    tensors_of = [dense_tensors(gradient) for gradient in step.gradients]

    in_forward = np.zeros(len(operations), bool)
    in_forward[number[step.loss.op.name]] = True
    needed_by = np.zeros((len(operations), count), bool)
    for k, tensors in enumerate(tensors_of):
        needed_by[[number[tensor.op.name] for tensor in tensors], k] = True
    for i in range(len(operations) - 1, -1, -1):
        in_forward[before[i]] |= in_forward[i]
        needed_by[before[i]] |= needed_by[i]
    needed_by[in_forward] = False
    _keep_one_owner_in_each_pair(needed_by, step, variables)

    sharers = needed_by.sum(axis=1)
    depth, chain_depth = needed_by.sum(axis=0), needed_by[sharers > 1].sum(axis=0)
    trained = [bool(tensors) for tensors in tensors_of]
    positions = np.array(sorted(range(count), key=lambda k: (not trained[k], chain_depth[k], depth[k], -k)))
    place = np.append(np.argsort(positions), -1)  # the last entry: of no tensor
    update = place[_update_owners(operations, step, variables, tensors_of, in_forward | (sharers > 0))]
    reached, reads_inputs = _forward_reach(operations, before, step, [variables[k] for k in positions])
    first = np.argmax(needed_by[:, positions], axis=1)
    from_inputs = in_forward & reads_inputs & (reached >= 0)
    own, shared = np.where(sharers == 1, first, -1), np.where(sharers > 1, first, -1)
    return Attribution(
        positions,
        kernels=_kernels(step, variables, place),
        features_mb=_features_mb(operations, before, np.where(in_forward, reached, -1), reads_inputs, count),
        operations=[*number],
        own=own,
        shared=shared,
        update=update,
        recomputed=np.where(from_inputs & (reached < count), reached, -1),
        in_forward=in_forward,
        in_preprocessing=from_inputs & (reached == count),
        in_other=~(in_forward | (sharers > 0) | (update >= 0)),
        places=dict(zip(number, np.maximum.reduce([own, shared, update]).tolist(), strict=True)),
    )


def _features_mb(
    operations: list[Any], before: list[list[int]], reached: np.ndarray, reads_inputs: np.ndarray, count: int
) -> np.ndarray:
    """`Attribution.features_mb` [count]; int [operations] `reached` as of `_forward_reach`, -1 outside of F.

    A tensor passes to the rest of a step if it depends on no trained variable, and one of its readers does.
    """
    lowest = np.full(len(operations), count + 1)  # of the readers of each operation's outputs
    for i in np.flatnonzero(reached >= 0).tolist():
        lowest[before[i]] = np.minimum(lowest[before[i]], reached[i])
    added = np.zeros(count + 2)  # at each depth
    for i in np.flatnonzero(reads_inputs & (reached >= 0) & (lowest < reached)).tolist():
        for output in operations[i].outputs[:1]:  # of several, the others are small
            megabytes = 1e-6 * output.dtype.size * (output.shape.num_elements() or 0)
            added[lowest[i] + 1] += megabytes
            added[reached[i] + 1] -= megabytes
    return np.maximum(np.cumsum(added)[1 : count + 1], 0.0)


def _kernels(step: TracedStep, variables: Sequence[keras.Variable], place: np.ndarray) -> np.ndarray:
    index = {id(variable): k for k, variable in enumerate(variables)}
    kernels = np.full(len(variables), -1)
    for pair in step.folded_pairs:
        kernel, *gamma = [place[index.get(id(variable), -1)] for variable in pair.kernel_variables]
        if kernel >= 0 and gamma and gamma[0] >= 0:
            kernels[gamma[0]] = kernel
    return kernels


def _forward_reach(
    operations: list[Any], before: list[list[int]], step: TracedStep, in_order: Sequence[keras.Variable]
) -> tuple[np.ndarray, np.ndarray]:
    """What each operation depends on, as far as the frozen prefix is concerned (`engine.prefix`).

    Int [operations], the first of the N variables `in_order` that it depends on; N if it depends on none, -1 if on the
    targets or on what differs from step to step. And bool [operations], whether it depends on the inputs.
    """
    count = len(in_order)
    rank = {id(variable.value.handle): k for k, variable in enumerate(in_order)}
    stateful = [op for op in operations if is_stateful(op)]
    variables = {inside.op.name for _, inside in step.graph.captures if inside.dtype.name == "resource"}
    written = variables & {tensor.op.name for op in stateful for tensor in op.inputs}
    inputs, targets = ({tensor.op.name for tensor in part} for part in (step.inputs, step.targets))
    first = dict.fromkeys([*targets, *written, *(op.name for op in stateful)], -1)
    first |= {inside.op.name: rank[id(outside)] for outside, inside in step.graph.captures if id(outside) in rank}
    reached, reads_inputs = np.full(len(operations), count), np.zeros(len(operations), bool)
    for i, op in enumerate(operations):
        reached[i] = min([first.get(op.name, count), *reached[before[i]]])
        reads_inputs[i] = op.name in inputs or reads_inputs[before[i]].any()
    return reached, reads_inputs


def _keep_one_owner_in_each_pair(needed_by: np.ndarray, step: TracedStep, variables: Sequence[keras.Variable]) -> None:
    """Of the operations that several tensors of one folded pair need, and no other tensor, the first tensor keeps all.

    Bool [operations, N] `needed_by` is changed in place.
    """
    index = {id(variable): k for k, variable in enumerate(variables)}
    sharers = needed_by.sum(axis=1)
    for pair in step.folded_pairs:
        members = [index[id(variable)] for variable in pair.tensors if id(variable) in index]
        within = needed_by[:, members].sum(axis=1)
        for i in np.flatnonzero((within > 1) & (within == sharers)):
            owner = next(k for k in members if needed_by[i, k])
            needed_by[i] = False
            needed_by[i, owner] = True


def dense_tensors(gradient: Any) -> list[Any]:
    """The tensors a gradient consists of: none, one, or the parts of an IndexedSlices."""
    if gradient is None:
        return []
    return [gradient] if not hasattr(gradient, "indices") else [gradient.values, gradient.indices]


def _update_owners(
    operations: list[Any],
    step: TracedStep,
    variables: Sequence[keras.Variable],
    tensors_of: list[list[Any]],
    computed: np.ndarray,
) -> np.ndarray:
    """For each operation the one tensor (index into `variables`) whose update it is part of, or -1.

    An operation outside loss and gradients belongs to the update of tensor k if it depends on the gradient or the
    variable of k and on those of no other tensor.
    """
    of_tensor = {t.name: k for k, tensors in enumerate(tensors_of) for t in tensors}
    handles = {id(variable.value.handle): k for k, variable in enumerate(variables)}
    of_tensor |= {inside.name: handles[id(read)] for read, inside in step.graph.captures if id(read) in handles}
    reached: dict[str, set[int]] = {}
    owner = np.full(len(operations), -1)
    for i, op in enumerate(operations):
        if computed[i] or op.type == "Placeholder":
            continue
        owners: set[int] = set()
        for tensor in op.inputs:
            known = of_tensor.get(tensor.name)
            owners |= reached.get(tensor.op.name, set()) if known is None else {known}
        reached[op.name] = owners
        if len(owners) == 1:
            [owner[i]] = owners
    return owner
