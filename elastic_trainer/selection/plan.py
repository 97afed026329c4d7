"""Plans: what elastic training would select from a timing table at several rho, for another board or for a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from elastic_trainer.datasets.batches import ShuffledData
from elastic_trainer.selection.budget import first_misses
from elastic_trainer.selection.schedule import Schedule
from elastic_trainer.selection.select import deepest_within, select_tensors, select_upper_part
from elastic_trainer.settings import Settings
from elastic_trainer.settings.flags import duration_text
from elastic_trainer.system.errors import UserError
from elastic_trainer.system.memory_budget import MemoryBudget, part_rows
from elastic_trainer.timing.table import TimingTable

PLANNED_RHOS = tuple(np.arange(10, 71, 5) / 100)
COMPARED_RHOS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 1.0)
NOT_FEASIBLE = "not feasible"  # even the head alone takes more


def plan_lines(table: TimingTable, head: np.ndarray) -> Iterator[str]:
    """What elastic training would select from `table` if all tensors mattered alike, without cached features: a row for
    each rho. The mask `head` always trains."""
    yield f" rho{'predicted step':>16}{'over full step':>16}{'trained tensors':>17}"
    for rho in PLANNED_RHOS:
        row = f"{NOT_FEASIBLE:>16}"
        if table.predict_ms(head) <= rho * table.full_step_ms:
            mask = select_tensors(table, np.ones(len(head)), head, rho)
            step_ms, count = table.predict_ms(mask), f"{mask.sum()} of {len(head)}"
            row = f"{step_ms:>13.1f} ms{step_ms / table.full_step_ms:>16.3f}{count:>17}"
        yield f"{rho:.2f}{row}"


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
        found = _plan_at(rho, table, head, data, settings, memory)
        row = f"{NOT_FEASIBLE:>14}"
        if found is not None:
            mask, step_ms, features_mb, memory_mb = found
            times = [f"{steps * step_ms / 1e3:.1f} s" for steps in (data.steps_per_epoch, schedule.total_steps)]
            training = "-" if settings.deadline is not None else times[1]
            row = f"{mask.sum():>6} of {len(head):>3}{step_ms:>9.1f} ms{times[0]:>10}{training:>12}"
            row += f"{features_mb:>9.0f} MB{memory_mb:>9,.0f} MB"
        yield f"{'→' if rho == chosen else ' '} {rho:.2f}{row}"


def _plan_at(
    rho: float, table: TimingTable, head: np.ndarray, data: ShuffledData, settings: Settings, memory: MemoryBudget
) -> tuple[np.ndarray, float, float, float] | None:
    """The mask at `rho`, its step time, and MB of its features and of the process; None if the head takes more."""
    assert table.memory is not None
    misses = first_misses(data, settings)
    if rho < 1 and table.predict_ms(head, misses) > rho * table.full_step_ms:
        return None
    size, parts = data.full_batch, settings.micro_batch
    try:
        max_depth = deepest_within(memory, table, head, size, parts)
    except UserError:
        return None
    training_mb = table.memory.needed_mb(size, parts)
    for each in dict.fromkeys((misses, 1.0)):  # without features, if they do not fit
        mask = select_upper_part(table, None, head, rho, each, max_depth)
        step, last = table.predict(mask, each), table.depth(mask) - 1
        one_mb, needed_mb = float(table.features_mb[last]) / size, memory.needed_mb(float(training_mb[last]))
        views = data.kept_views(data.train_count * one_mb, min(data.room_mb, memory.limit_mb - needed_mb))
        features_mb = (data.train_count * views + data.test_count) * one_mb * step.uses_features
        needed_mb += features_mb
        if not step.uses_features or needed_mb <= memory.limit_mb:
            break
    return mask, step.step_ms + step.caching_ms, features_mb, needed_mb
