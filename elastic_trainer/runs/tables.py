"""The tables of a run: metrics.csv has a row per epoch, selections.csv a row per tensor of each selection.

The row of epoch 0 is the model that training started from, if it was tested.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_trainer.files import write_csv
from elastic_trainer.runs.reader import METRICS, SELECTIONS

if TYPE_CHECKING:
    from elastic_trainer.runs.history import History

SELECTION_COLUMNS = (
    *("epoch", "step", "name", "importance", "chosen"),
    *("predicted_step_ms", "budget_step_ms", "measured_step_ms", "rho", "slowdown", "correction"),
)


def write_tables(folder: Path, history: History, tensor_names: Sequence[str]) -> None:
    """Write both tables completely; metrics.csv only once an epoch is complete.

    Args:
        folder: the run's folder.
        history: the run so far.
        tensor_names: names of `model.trainable_variables`, in their order.
    """
    if history.epochs:
        write_csv(folder / METRICS, list(history.epochs[0]), (list(row.values()) for row in _epoch_rows(history)))
    write_csv(folder / SELECTIONS, SELECTION_COLUMNS, _selection_rows(history, tensor_names))


def _epoch_rows(history: History) -> Iterator[dict[str, Any]]:
    if history.start is not None:
        tested = {f"test_{name}": value for name, value in history.start.items()}
        yield {**dict.fromkeys(history.epochs[0]), "epoch": 0, "step": 0, "train_seconds": 0.0, **tested}
    yield from history.epochs


def _selection_rows(history: History, tensor_names: Sequence[str]) -> Iterator[tuple[object, ...]]:
    for selection in history.selections:
        measured = statistics.median(selection.step_ms) if selection.step_ms else None
        budget = (selection.predicted_step_ms, selection.budget_step_ms, measured)
        correction = (selection.rho, selection.slowdown, selection.correction)
        epoch = f"{selection.epoch:.6g}"
        for index, name in enumerate(tensor_names):
            importance = None if selection.importance is None else float(selection.importance[index])
            yield (epoch, selection.step, name, importance, int(selection.mask[index]), *budget, *correction)
