"""Reads the files in run folders: config.json, summary.json, metrics.csv, selections.csv."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from elastic_trainer.settings import BEST_MODEL, LAST_MODEL, Settings
from elastic_trainer.system.errors import UserError
from elastic_trainer.system.files import read_record, trusting

CONFIG, SUMMARY, METRICS, SELECTIONS = "config.json", "summary.json", "metrics.csv", "selections.csv"


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of the run in `folder`."""
    return read_record(folder / CONFIG)


def read_settings(folder: Path) -> Settings:
    """The settings of the run in `folder`, by its config.json."""
    config = read_config(folder)
    with trusting(folder / CONFIG):
        values = {one.name: config[one.name] for one in fields(Settings)}
        paths = {name: Path(values[name]) for name in ("data_dir", "logdir", "evaluate") if values[name] is not None}
        return Settings(**{**values, **paths})


def check_images(folder: Path, now: dict[str, Any]) -> None:
    """Raise `UserError` if the run to resume in `folder` was started with other images; `now`: `ImageData.record`."""
    before = read_config(folder)["images"]
    change = changed_class(now["class_names"], before["class_names"])
    for kind in ("training", "test"):
        is_, was = now.get(f"{kind}_images"), before.get(f"{kind}_images")
        if change is None and is_ != was:
            change = f"other {kind} images ({was}; now {is_})"
    if change is not None:
        raise UserError(
            f"--resume: the run in {folder} was started with {change}; use the same, or give another --run_name"
        )


def changed_class(now: Sequence[str], before: Sequence[str]) -> str | None:
    """How two lists of class names differ, as "class 3 'was', not 'is'"; None if they are equal."""
    if len(now) == len(before):
        pairs = enumerate(zip(now, before, strict=True), 1)
        return next((f"class {number} '{was}', not '{is_}'" for number, (is_, was) in pairs if is_ != was), None)
    sides = (("missing", before, now), ("new", now, before))
    found = [f"'{name}' is {what}" for what, some, others in sides for name in some if name not in others]
    return f"{len(before)} classes, not {len(now)} ({', '.join(found[:3])}{', …' if len(found) > 3 else ''})"


def read_summary(folder: Path) -> dict[str, Any]:
    """summary.json of the run in `folder`."""
    return read_record(folder / SUMMARY)


def config_of_model(model: Path) -> dict[str, Any]:
    """config.json of the run that trained a model, given its folder, or the last or best model in it; else empty."""
    folder = model if model.is_dir() else model.parent
    is_its_own = model.is_dir() or model.name in (BEST_MODEL, LAST_MODEL)
    return read_config(folder) if is_its_own and is_run(folder) else {}


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file with a header line."""
    with path.open(newline="", encoding="utf-8") as file:
        return [*csv.DictReader(file)]


def read_epochs(folder: Path) -> list[dict[str, str]]:
    """The rows of metrics.csv of the run in `folder`; there must be some."""
    with trusting(folder / METRICS):
        epochs = read_rows(folder / METRICS)
        if not epochs:
            raise ValueError
    return epochs


def is_run(folder: Path) -> bool:
    return (folder / CONFIG).exists()


def is_finished(folder: Path) -> bool:
    return (folder / SUMMARY).is_file()


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
        path, epochs = self.folder / SELECTIONS, dict[str, list[tuple[bool, float]]]()
        with trusting(path):
            for row in read_rows(path):
                chosen = (row["chosen"] == "1", float(row["importance"] or "nan"))
                epochs.setdefault(row["epoch"], []).append(chosen)
            if len({*map(len, epochs.values())}) != 1:
                raise ValueError
            table = np.array([*epochs.values()], float)
            return Selections(np.array([*epochs], float), table[:, :, 0] == 1, table[:, :, 1])


def read_run(folder: Path) -> FinishedRun:
    """The finished run in `folder`. Raises `UserError` if there is none."""
    try:
        summary, config, epochs = read_summary(folder), read_config(folder), read_epochs(folder)
    except UserError as error:
        raise UserError(f"{folder}: contains no finished run ({error})") from error
    return FinishedRun(folder, summary, config, [row for row in epochs if row.get("epoch") != "0"])
