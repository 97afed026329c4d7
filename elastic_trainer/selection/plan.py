"""Plans: what elastic training would select from a timing table at several rho, for another board or for a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from elastic_trainer.datasets.batches import ShuffledData, part_rows
from elastic_trainer.engine.memory import MemoryBudget
from elastic_trainer.selection.budget import first_misses
from elastic_trainer.selection.schedule import Schedule
from elastic_trainer.selection.select import Plan, select_tensors, select_upper_part
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


def run_plan(
    table: TimingTable,
    head: np.ndarray,
    data: ShuffledData,
    settings: Settings,
    memory: MemoryBudget,
    chosen: float,
    others: Iterable[float] = (),
) -> Iterator[str]:
    """What a run of these settings would take at rho `chosen`, which is marked, and at `others`: a row for each.

    All tensors from the output down train, since nothing is measured; at rho 1 it is full training.
    """
    schedule = Schedule.of(settings, data.steps_per_epoch)
    length = f"{schedule.epochs} epoch{'s' if schedule.epochs != 1 else ''} of {schedule.steps_per_epoch} steps"
    if settings.deadline is not None:
        length = f"steps until {duration_text(settings.deadline)} have passed"
    rows = part_rows(data.batch_size, settings.micro_batch)
    in_parts = f" in parts of {rows}" if rows < data.batch_size else ""
    limit = f"limit {memory.limit_mb:,.0f} MB" if memory.has_limit else "no limit"
    yield (
        f"plan: {length}, {data.batch_size} images each{in_parts}; training: its steps; memory: of the whole process, "
        f"{limit}"
    )
    columns = (("tensors", 12), ("step", 12), ("epoch", 10), ("training", 12), ("features", 12), ("memory", 12))
    yield "   rho" + "".join(f"{name:>{width}}" for name, width in columns)
    for rho in sorted({chosen, *others}):
        start = f"{'→' if rho == chosen else ' '} {rho:.2f}  "
        found = _plan_at(rho, table, head, data, settings, memory)
        if found is None:
            yield f"{start}{'not feasible':>10}"
            continue
        plan, features_mb, memory_mb = found
        step_ms = plan.step_ms + plan.caching_ms
        epoch, training = (f"{steps * step_ms / 1e3:.1f} s" for steps in (data.steps_per_epoch, schedule.total_steps))
        yield (
            f"{start}{int(plan.mask.sum()):>4} of {len(head):>3}{step_ms:>9.1f} ms{epoch:>10}"
            f"{'-' if settings.deadline is not None else training:>12}{features_mb:>9.0f} MB"
            f"{'unknown' if memory_mb is None else f'{memory_mb:,.0f} MB':>12}"
        )


def _plan_at(
    rho: float,
    table: TimingTable,
    head: np.ndarray,
    data: ShuffledData,
    settings: Settings,
    memory: MemoryBudget,
) -> tuple[Plan, float, float | None] | None:
    """The plan at `rho`, with MB of its features and of the process (None: unknown).

    None if even the head alone takes more, or more memory.
    """
    misses, training_mb, max_depth = first_misses(data, settings), None, None
    if table.memory is not None:
        training_mb = table.memory.needed_mb(data.full_batch, settings.micro_batch)
        if not memory.fits(training_mb[table.depth(head) - 1]):
            return None
        max_depth = max(memory.deepest(training_mb), table.depth(head))
    if rho < 1 and table.predict_ms(head, misses) > rho * table.full_step_ms:
        return None
    batches = (data.train_count * (data.view_count or 1) + data.test_count) / data.full_batch  # of all features
    for each in dict.fromkeys((misses, 1.0)):  # without features, if they do not fit
        plan = select_upper_part(table, np.zeros(len(head)), head, rho, each, max_depth)
        last = table.depth(plan.mask) - 1
        features_mb = batches * float(table.features_mb[last]) * plan.uses_features
        needed_mb = None if training_mb is None else memory.needed_mb(float(training_mb[last]) + features_mb)
        if not plan.uses_features or needed_mb is None or needed_mb <= memory.limit_mb:
            break
    return plan, features_mb, needed_mb
