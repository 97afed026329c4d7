"""Plans: what elastic training would select from a timing table at several rho, for another board or for a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from elastic_trainer.datasets.batches import ShuffledData, part_rows
from elastic_trainer.engine.memory import MemoryBudget
from elastic_trainer.selection.budget import first_misses
from elastic_trainer.selection.schedule import Schedule
from elastic_trainer.selection.select import select_tensors, select_upper_part
from elastic_trainer.settings import Settings
from elastic_trainer.settings.flags import duration_text
from elastic_trainer.timing.table import TimingTable

PLANNED_RHOS = tuple(np.arange(10, 71, 5) / 100)
COMPARED_RHOS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 1.0)


def plan_lines(table: TimingTable, head: np.ndarray, importance: np.ndarray) -> Iterator[str]:
    """What elastic training would select from `table`, a row for each rho, without and with cached features.

    Bool [N] `head` always trains; `importance` is [N].
    """
    yield f"      {'without cached features':>34}  {'with cached features':>34}"
    columns = f"{'predicted':>12}{'over full':>11}{'tensors':>11}"
    yield f" rho  {columns}  {columns}"
    for rho in PLANNED_RHOS:
        cells = []
        for misses in (1.0, 0.0):
            cell = "not feasible"  # even the head alone takes more
            if table.predict_ms(head, misses) <= rho * table.full_step_ms:
                mask = select_tensors(table, importance, head, rho, misses=misses).mask
                step_ms, count = table.predict_ms(mask, misses), f"{int(mask.sum())} of {len(head)}"
                cell = f"{step_ms:9.1f} ms{step_ms / table.full_step_ms:11.3f}{count:>11}"
            cells.append(f"{cell:>34}")
        yield f"{rho:.2f}  {'  '.join(cells)}"


class RunPlan(NamedTuple):
    """What a run would take at one rho."""

    tensors: int
    step_ms: float  # with making features
    training: float  # seconds
    features_mb: float
    memory_mb: float | None  # of the whole process; None: unknown


class RunPlanner:
    """What runs of the same settings would take at any rho.

    All tensors from the output down train, since nothing is measured. `memory` is by default the limit of the settings.
    """

    def __init__(
        self,
        table: TimingTable,
        head: np.ndarray,
        data: ShuffledData,
        settings: Settings,
        memory: MemoryBudget | None = None,
    ) -> None:
        self.table, self.head, self.data, self.settings = table, head, data, settings
        self.memory = memory or MemoryBudget(settings.memory)
        self.schedule = Schedule.of(settings, data.steps_per_epoch)

    def at(self, rho: float) -> RunPlan | None:
        """The run at `rho`; None if even the head alone takes more, or more memory."""
        table, data, settings, memory = self.table, self.data, self.settings, self.memory
        misses, training_mb, depth = first_misses(data, settings), None, table.depth(self.head)
        if table.memory is not None:
            training_mb = table.memory.needed_mb(data.full_batch, settings.micro_batch)
            if not memory.fits(training_mb[depth - 1]):
                return None
        if rho < 1 and table.predict_ms(self.head, misses) > rho * table.full_step_ms:
            return None
        max_depth = None if training_mb is None else max(memory.deepest(training_mb), depth)
        for each in dict.fromkeys((misses, 1.0)):  # without features, if they do not fit
            plan = select_upper_part(table, np.zeros(len(self.head)), self.head, rho, each, max_depth)
            last = table.depth(plan.mask) - 1
            batches = data.train_count * (data.view_count or 1) / data.full_batch
            features_mb = batches * float(table.features_mb[last]) * plan.uses_features
            needed_mb = None if training_mb is None else memory.needed_mb(float(training_mb[last]) + features_mb)
            if not plan.uses_features or needed_mb is None or needed_mb <= memory.limit_mb:
                break
        step_ms = plan.step_ms + plan.caching_ms
        training = self.schedule.total_steps * step_ms / 1e3
        return RunPlan(int(plan.mask.sum()), step_ms, training, features_mb, needed_mb)

    @property
    def _length(self) -> str:
        if self.settings.deadline is not None:
            return f"steps until {duration_text(self.settings.deadline)} have passed"
        epochs = self.schedule.epochs
        return f"{epochs} epoch{'s' if epochs != 1 else ''} of {self.schedule.steps_per_epoch} steps"

    def line(self, rho: float) -> str:
        """The run at `rho` in one line."""
        interval, plan = self.settings.interval, self.at(rho)
        is_once = interval is None or interval >= self.schedule.epochs
        text = f"plan: {self._length}, {'one selection' if is_once else f'a selection every {interval:g} epochs'}; "
        text += f"at rho {rho:g} "
        if plan is None:
            return f"{text}not feasible"
        text += (
            f"a step takes {plan.step_ms:.0f} of {self.table.full_step_ms:.0f} ms and trains about {plan.tensors} of "
            f"{len(self.head)} tensors"
        )
        if self.settings.deadline is None:
            text += f"; {duration_text(plan.training)} of training steps"
        return text + ("" if plan.memory_mb is None else f", {plan.memory_mb:,.0f} MB of memory") + " (more: --plan)"

    def lines(self, rho: float) -> Iterator[str]:
        """A row for each of `COMPARED_RHOS`, of which 1 is full training; the row of `rho` is marked."""
        schedule, memory, batch_size = self.schedule, self.memory, self.data.batch_size
        rows = part_rows(batch_size, self.settings.micro_batch)
        in_parts = f" in parts of {rows}" if rows < batch_size else ""
        limit = f"limit {memory.limit_mb:,.0f} MB" if memory.has_limit else "no limit"
        yield (
            f"plan: {self._length}, {batch_size} images each{in_parts}; training: its steps; memory: of the whole "
            f"process, {limit}"
        )
        columns = (("step", 12), ("epoch", 10), ("training", 12), ("features", 12), ("memory", 12))
        yield f"   rho  {'tensors':>10}" + "".join(f"{name:>{width}}" for name, width in columns)
        for each in sorted({rho, *COMPARED_RHOS}):
            mark, plan = "→" if each == rho else " ", self.at(each)
            if plan is None:
                yield f"{mark} {each:.2f}  {'not feasible':>10}"
                continue
            total = "unknown" if plan.memory_mb is None else f"{plan.memory_mb:,.0f} MB"
            yield (
                f"{mark} {each:.2f}  {plan.tensors:>4} of {len(self.head):>3}{plan.step_ms:>9.1f} ms"
                f"{schedule.steps_per_epoch * plan.step_ms / 1e3:>8.1f} s{self._training(plan)}"
                f"{plan.features_mb:>9.0f} MB{total:>12}"
            )

    def _training(self, plan: RunPlan) -> str:
        return f"{'-':>12}" if self.settings.deadline is not None else f"{plan.training:>10.1f} s"
