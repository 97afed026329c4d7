"""What the figures read of a finished run. `plotting` is imported first: it sets the import path."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from elastic_trainer.runs.reader import METRICS, SELECTIONS, read_config, read_rows, read_summary
from elastic_trainer.system.errors import UserError
from elastic_trainer.system.files import trusting


class Selections(NamedTuple):
    """The selections of a run, in their order."""

    epochs: np.ndarray  # [S] time of each, in epochs since the start
    chosen: np.ndarray  # bool [S, N], the selected tensors
    importance: np.ndarray  # [S, N], NaN for schemes that do not measure it


@dataclass(frozen=True)
class FinishedRun:
    """A finished run: its folder, summary.json, config.json, and the rows of metrics.csv of epochs that it trained."""

    folder: Path
    summary: dict[str, Any]
    config: dict[str, Any]
    epochs: list[dict[str, str]]

    def column(self, name: str) -> list[float]:
        """A column of metrics.csv; NaN for empty cells. Raises `UserError` if it is damaged."""
        with trusting(self.folder / METRICS):
            return [float(row[name]) if row.get(name) else np.nan for row in self.epochs]

    def selections(self) -> Selections:
        """What it selected. Raises `UserError` if selections.csv is damaged or has no selection."""
        path = self.folder / SELECTIONS
        with trusting(path):
            rows = read_rows(path)
            numbers = [[float(row[name] or "nan") for name in ("epoch", "chosen", "importance")] for row in rows]
            count = len({row["name"] for row in rows})  # of the tensors: each selection has a row of each
            epochs, chosen, importance = np.array(numbers).T.reshape(3, -1, count)
            return Selections(epochs[:, 0], chosen == 1, importance)


def read_run(folder: Path) -> FinishedRun:
    """The finished run in `folder`. Raises `UserError` if there is none."""
    try:
        summary, config = read_summary(folder), read_config(folder)
        with trusting(folder / METRICS):
            rows = read_rows(folder / METRICS)
            if not rows:
                raise ValueError
    except UserError as error:
        raise UserError(f"{folder}: contains no finished run ({error})") from error
    return FinishedRun(folder, summary, config, [row for row in rows if row.get("epoch") != "0"])
