"""The one reader of what runs leave in their folders: config.json, summary.json, metrics.csv, selections.csv."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from elastic_trainer.settings import TRAIN_TYPES
from utils import UserError

CONFIG, SUMMARY, METRICS, SELECTIONS = "config.json", "summary.json", "metrics.csv", "selections.csv"


def read_json(path: Path) -> dict[str, Any]:
    """An object in a JSON file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds no JSON object.
    """
    record = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(record, dict):
        raise ValueError(f"{path.name} holds no object")
    return record


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file with a header line. Raises `OSError` if it cannot be read."""
    with path.open(newline="", encoding="utf-8") as file:
        return [*csv.DictReader(file)]


def is_run(folder: Path) -> bool:
    """Whether a run was started in `folder`."""
    return (folder / CONFIG).exists()


def is_finished(folder: Path) -> bool:
    """Whether `folder` holds a finished run."""
    return (folder / SUMMARY).is_file()


def read_own(folder: Path, name: str) -> dict[str, Any]:
    """`CONFIG` or `SUMMARY` of the run in `folder`. Raises `UserError` if it is damaged."""
    try:
        return read_json(folder / name)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / name} is damaged; start again with --overwrite") from error


def started_with(folder: Path) -> list[str]:
    """The words of the command line that started the run in `folder`. Raises `UserError` if there is no run."""
    try:
        return [*map(str, read_json(folder / CONFIG)["command"])]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--resume {folder}: is not the folder of a run: its config.json cannot be read; give one, as logs/my_run"
        ) from error


def config_of_model(folder: Path) -> dict[str, Any]:
    """The options of the run that left a model in `folder`; empty if it is no run's folder. Raises `UserError`."""
    path = folder / CONFIG
    if not path.is_file():
        return {}
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise UserError(f"--evaluate: {path} cannot be read: {error}; fix or remove it") from error


class Selections(NamedTuple):
    """The selections of a run, in their order.

    Attributes:
        epochs: [S] when each was made, in epochs since the start.
        chosen: bool [S, N], the tensors that it trains.
        importance: [S, N], NaN for schemes that measure none.
    """

    epochs: np.ndarray
    chosen: np.ndarray
    importance: np.ndarray


@dataclass(frozen=True)
class FinishedRun:
    """What a run left: its folder, summary.json, config.json, and the rows of metrics.csv."""

    folder: Path
    summary: dict[str, Any]
    config: dict[str, Any]
    epochs: list[dict[str, str]]

    def column(self, name: str) -> list[float]:
        """A column of metrics.csv; NaN where a row is empty."""
        return [float(row[name]) if row.get(name) else np.nan for row in self.epochs]

    def selections(self) -> Selections:
        """The run's selections.csv."""
        epochs: dict[str, list[tuple[bool, float]]] = {}
        for row in read_rows(self.folder / SELECTIONS):
            chosen = (row["chosen"] == "1", float(row["importance"] or "nan"))
            epochs.setdefault(row["epoch"], []).append(chosen)
        table = np.array([*epochs.values()], float)
        return Selections(np.array([*epochs], float), table[:, :, 0] == 1, table[:, :, 1])


def read_run(folder: Path) -> FinishedRun:
    """Raises `UserError` if `folder` holds no finished run."""
    try:
        summary, config = read_json(folder / SUMMARY), read_json(folder / CONFIG)
        run = FinishedRun(folder, summary, config, read_rows(folder / METRICS))
        if summary["train_type"] not in TRAIN_TYPES or not run.epochs:
            raise ValueError(f"a run of {summary['train_type']} with {len(run.epochs)} epochs")
        return run
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{folder}: does not hold a finished run ({error})") from error


def latest_importance(logdir: Path, names: Sequence[str]) -> tuple[np.ndarray, Path] | None:
    """Importance [N] that the newest elastic run of this network under `logdir` measured last, and its file.

    Args:
        logdir: the folder of runs.
        names: of the network's trainable tensors, in their order.
    """
    files = [path for path in logdir.glob(f"*/{SELECTIONS}") if path.is_file()]
    for path in sorted(files, key=lambda path: path.stat().st_mtime, reverse=True):
        rows = read_rows(path)[-len(names) :]
        try:
            if [row["name"] for row in rows] == list(names):
                return np.array([float(row["importance"]) for row in rows]), path
        except (KeyError, ValueError):
            continue  # a run of a scheme that measures no importance
    return None
