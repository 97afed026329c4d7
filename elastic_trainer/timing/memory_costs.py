"""What each tensor of a network costs in memory, by data flow: the counterpart of its times in the timing table.

What the forward pass writes stays in memory until the last gradient operation that reads it has run. Operations are
given to tensors as in `timing.attribution`: those of the error chain run if any deeper tensor trains, those of a
tensor's own gradient if that tensor trains. So the bytes that a step keeps follow from its selection, and are the sum
over what the forward pass writes. When the backward pass starts, all of it is there:

    training = max(forward, always + own[trained] + chain[down to the deepest] + kept[read by what runs])

forward   if the forward pass takes the most
always    the largest tensors of the backward pass, TensorFlow itself, validation
own       of a tensor: the operations of its gradient and its update, and the optimizer's variables
chain     the operations that pass the error on to a tensor
kept      results of the forward pass
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from elastic_trainer.engine.memory_simulation import size_of, source
from elastic_trainer.engine.step_memory import (
    OPERATION_MB,
    TENSORS_FACTOR,
    TRAINED_FACTOR,
    beside_steps_mb,
    forward_memory,
    split_graph_mb,
    step_memory,
    variables_mb,
)

if TYPE_CHECKING:
    from elastic_trainer.engine.step import TrainStep
    from elastic_trainer.timing.attribution import Attribution

NO_CHAIN = -1


class Kept(NamedTuple):
    """Results of the forward pass that the same operations read, together."""

    owners: tuple[int, ...]  # places of the tensors, any of which keeps them if it trains
    chain: int  # the first place down to which the error chain keeps them; `NO_CHAIN` if it never does
    megabytes: float


class MemoryCosts(NamedTuple):
    """See the module's header, in MB; arrays [N] are in backward order. `split_graph_mb` as of `engine.step_memory`."""

    forward_mb: float
    always_mb: float
    split_graph_mb: float
    own_mb: np.ndarray
    chain_mb: np.ndarray
    kept: list[Kept]

    def predict(self, selected: np.ndarray) -> float:
        """MB that training `selected`, bool [N] in backward order, takes beyond what was there before."""
        total, reached, trained = self.fixed_mb(selected), _reached(selected), {*np.flatnonzero(selected).tolist()}
        for kept in self.kept:
            if (kept.chain > NO_CHAIN and reached[kept.chain]) or not trained.isdisjoint(kept.owners):
                total += kept.megabytes
        return max(total, self.forward_mb)

    def fixed_mb(self, selected: np.ndarray) -> float:
        """The part of `predict` that does not depend on the batch."""
        return self.always_mb + float(self.own_mb[selected].sum() + self.chain_mb[_reached(selected)].sum())

    def to_record(self) -> dict[str, Any]:
        """All of it in JSON's types."""
        return {**self._asdict(), "own_mb": self.own_mb.tolist(), "chain_mb": self.chain_mb.tolist()}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> MemoryCosts:
        """What `to_record` returned."""
        kept = [Kept(tuple(owners), chain, megabytes) for owners, chain, megabytes in record["kept"]]
        arrays = {name: np.array(record[name]) for name in ("own_mb", "chain_mb")}
        return cls(**{**record, **arrays, "kept": kept})


def _reached(selected: np.ndarray) -> np.ndarray:
    """Bool [N] in backward order: those that the error chain reaches, down to the deepest of bool [N] `selected`."""
    return np.logical_or.accumulate(selected[::-1])[::-1]


def memory_costs(full: TrainStep, attribution: Attribution) -> MemoryCosts:
    """The costs of a network's tensors, from the step that trains them all, of a batch of known size."""
    count, kept = len(attribution.positions), _kept(full.graph, attribution)
    whole, forward = step_memory(full.graph, full.variables), forward_memory(full.graph, full.loss)
    own_mb, chain_mb = (
        OPERATION_MB * np.bincount(places[places >= 0], minlength=count)
        for places in (np.concatenate([attribution.own, attribution.update]), attribution.shared)
    )
    own_mb += TRAINED_FACTOR * np.array([variables_mb([full.variables[k]]) for k in attribution.positions])
    always_mb = whole.megabytes - sum(each.megabytes for each in kept) - float(own_mb.sum() + chain_mb.sum())
    run_mb = beside_steps_mb(forward, full.inputs)
    always_mb = max(always_mb, forward.fixed_mb) + run_mb
    return MemoryCosts(forward.megabytes + run_mb, always_mb, split_graph_mb(forward), own_mb, chain_mb, kept)


def _kept(graph: Any, attribution: Attribution) -> list[Kept]:
    place = {name: index for index, name in enumerate(attribution.operations)}
    owners: dict[str, set[int]] = defaultdict(set)
    chains: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for op in graph.get_operations():
        index = place[op.name]
        own, shared = int(attribution.own[index]), int(attribution.shared[index])
        if attribution.in_forward[index] or (own < 0 and shared < 0):
            continue
        for tensor in map(source, op.inputs):
            if not attribution.in_forward[place[tensor.op.name]] or tensor.op.type in ("Const", "Placeholder"):
                continue
            sizes[tensor.name] = size_of(tensor)
            if own >= 0:
                owners[tensor.name].add(own)
            else:
                chains[tensor.name] = min(chains.get(tensor.name, shared), shared)
    totals: dict[tuple[tuple[int, ...], int], float] = defaultdict(float)
    for name, size in sizes.items():
        chain = chains.get(name, NO_CHAIN)
        others = (owner for owner in owners[name] if chain == NO_CHAIN or owner < chain)
        totals[tuple(sorted(others)), chain] += TENSORS_FACTOR * size / 1e6
    return [Kept(*key, megabytes) for key, megabytes in totals.items() if megabytes > 0]
