"""Timing tables of compiled models, kept for the next program."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from elastic_trainer.datasets.batches import Batch
from elastic_trainer.engine.memory import MEASURED_SHARE, MemoryBudget
from elastic_trainer.engine.task import CompiledTask
from elastic_trainer.settings import TABLE_RECORD
from elastic_trainer.system.errors import UserError
from elastic_trainer.timing.graph_digest import graph_digest
from elastic_trainer.timing.profiling import compiled_settings, numbered_names, profile_compiled
from elastic_trainer.timing.run_steps import table_of_steps
from elastic_trainer.timing.table import TimingTable
from elastic_trainer.timing.table_file import load_table, save_table

Say = Callable[[str], None]  # a line to the user
FROM_STEPS = "_steps"  # ends the name of the folder of a table that a run's own steps made


class KeptTables:
    """Where the tables of a task at one batch size are kept.

    Args:
        task, batch_size: what is trained.
        folder: of a measured table; None: one for this model, in the user's cache.
        say: takes lines on what is found and kept.
    """

    def __init__(self, task: CompiledTask, batch_size: int, folder: str | os.PathLike[str] | None, say: Say) -> None:
        self._task, self._batch_size, self._say = task, batch_size, say
        self._shapes = [tuple(variable.shape) for variable in task.model.trainable_variables]
        self._settings, self._graph = compiled_settings(task, batch_size), graph_digest(task, batch_size)
        self._names = numbered_names(task.model)
        key = hashlib.sha256(f"{self._graph} {self._settings} {self._names} {self._shapes}".encode()).hexdigest()[:16]
        self._folder = _cache_folder() / key if folder is None else Path(folder)

    def measured(self, batch: Batch, memory: MemoryBudget) -> TimingTable:
        """The kept table, or one that is measured now."""
        found = self._load(self._folder, "it is measured again")
        if found is not None:
            return found
        self._say("measuring what each tensor costs to train")
        with memory.reusing(MEASURED_SHARE):
            table = profile_compiled(self._task, batch)
        if table.details["timing"] == "flops":
            self._say("another profiler is running, so times of tensors follow from FLOPs; the next fit measures again")
            return table
        if table.doubt is not None:
            self._say(table.warning("was the device busy? It is used now; the next fit measures again"))
        self._keep(table, self._folder)
        return table

    def of_steps(self, full_ms: float) -> TimingTable:
        """The kept table, measured or of steps, or one by FLOPs; a step of plain `fit` takes `full_ms` by it."""
        folders = (self._folder, self._steps_folder)
        found = next((table for folder in folders if (table := self._load(folder, "another one is made"))), None)
        if found is None:
            table = table_of_steps(self._task, self._task.model.optimizer, self._batch_size, full_ms, self._settings)
            return replace(table, names=[self._names[k] for k in table.positions])
        return found.scaled(full_ms / (found.plain_over_full * found.full_step_ms))

    def keep_of_steps(self, table: TimingTable) -> None:
        """Keep a table that started from `of_steps`, unless a measured one is kept."""
        if not (self._folder / TABLE_RECORD).exists():
            self._keep(table, self._steps_folder)

    @property
    def _steps_folder(self) -> Path:
        return self._folder.with_name(self._folder.name + FROM_STEPS)

    def _load(self, folder: Path, then: str) -> TimingTable | None:
        """The table in `folder`; None if there is none, or none to rely on, which is said with what follows."""
        if not (folder / TABLE_RECORD).exists():
            return None
        try:
            table = load_table(folder, self._settings, self._names, self._shapes, self._graph, then)
        except UserError as error:
            self._say(str(error))
            return None
        if table.doubt is not None:
            self._say(table.warning(then))
        return table if table.doubt is None else None

    def _keep(self, table: TimingTable, folder: Path) -> None:
        try:
            save_table(table, folder)
            self._say(f"timing table kept in {folder}")
        except UserError as error:
            self._say(f"the timing table is not kept: {error}")


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "elastic_trainer"
