"""Plans: what elastic training would select from a timing table at several rho, for another board or for a run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from elastic_trainer.datasets.batches import ShuffledData, part_rows
from elastic_trainer.memory.budget import MemoryBudget
from elastic_trainer.selection.budget import first_misses
from elastic_trainer.selection.deadline import RunTime
from elastic_trainer.selection.memory_budget import MEMORY_SHARE, feature_batches
from elastic_trainer.selection.schedule import Schedule
from elastic_trainer.selection.select import select_tensors, select_upper_part
from elastic_trainer.settings import Settings
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


def run_plan_lines(
    table: TimingTable,
    head: np.ndarray,
    data: ShuffledData,
    settings: Settings,
    rho: float,
    others: Sequence[float] = (),
    memory: MemoryBudget | None = None,
) -> Iterator[str]:
    """What a run would take, a row for each rho; all tensors from the output down train, since nothing is measured.

    The row of the run's `rho` is marked among `others`, of which 1 is full training; `memory` is by default the limit
    of the settings.
    """
    schedule, memory = Schedule.of(settings, data.steps_per_epoch), memory or MemoryBudget(settings.memory)
    run_time, selections = RunTime.of(table, data, settings), len(schedule.selection_steps(settings.interval))
    rows = part_rows(data.batch_size, settings.micro_batch)
    in_parts = f" in parts of {rows}" if rows < data.batch_size else ""
    limit = f"limit {memory.limit_mb:,.0f} MB" if memory.has_limit else "no limit"
    yield (
        f"plan: {schedule.epochs} epochs of {schedule.steps_per_epoch} steps, {data.batch_size} images each{in_parts}; "
        f"in all: with selecting and validation; memory: of the whole process, {limit}"
    )
    columns = (("step", 12), ("epoch", 10), ("training", 12), ("in all", 12), ("features", 12), ("memory", 12))
    yield f"   rho  {'tensors':>10}" + "".join(f"{name:>{width}}" for name, width in columns)
    room_mb = MEMORY_SHARE * memory.limit_mb - (memory.start_mb or 0.0)
    misses, batches = first_misses(data, settings), feature_batches(data, settings)
    is_too_large = room_mb < math.inf and table.predict_mb(head) > room_mb
    for each in sorted({rho, *others}):
        mark = "→" if each == rho else " "
        if is_too_large or (each < 1 and table.predict_ms(head, misses) > each * table.full_step_ms):
            yield f"{mark} {each:.2f}  {'not feasible':>10}"
            continue
        plan = select_upper_part(table, np.zeros(len(head)), head, each, None, misses, room_mb, batches)
        step_ms = plan.step_ms + plan.caching_ms
        training = schedule.total_steps * step_ms / 1e3
        in_all = training + run_time.beside(schedule.epochs, selections, training)
        kept = batches * plan.uses_features
        features_mb = kept * float(table.features_mb[table.depth(plan.mask) - 1])
        total = "unknown"
        if table.memory is not None:
            total = f"{memory.needed_mb(table.predict_mb(plan.mask, kept)):,.0f} MB"
        yield (
            f"{mark} {each:.2f}  {int(plan.mask.sum()):>4} of {len(head):>3}{step_ms:>9.1f} ms"
            f"{schedule.steps_per_epoch * step_ms / 1e3:>8.1f} s{training:>10.1f} s{in_all:>10.1f} s"
            f"{features_mb:>9.0f} MB{total:>12}"
        )
