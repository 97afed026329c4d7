"""Reads the files in run folders: config.json, summary.json, metrics.csv, selections.csv."""

from __future__ import annotations

import csv
from dataclasses import fields
from pathlib import Path
from typing import Any

from elastic_trainer.datasets.named import changed_class
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
        values = {one.name: config.get(one.name, one.default) for one in fields(Settings)}
        paths = {name: Path(values[name]) for name in ("data_dir", "logdir", "evaluate") if values[name] is not None}
        return Settings(**{**values, **paths})


def check_images(folder: Path, now: dict[str, Any]) -> None:
    """Raise `UserError` if the run to resume in `folder` was started with other images; `now`: `ImageData.record`."""
    before = read_config(folder)["images"]
    change = changed_class(now["class_names"], before["class_names"])
    for kind in ("training", "test"):
        is_, was = now[f"{kind}_images"], before[f"{kind}_images"]
        change = change or (f"other {kind} images ({was}; now {is_})" if is_ != was else None)
    if change is not None:
        raise UserError(
            f"--resume: the run in {folder} was started with {change}; use the same, or give another --run_name"
        )


def read_summary(folder: Path) -> dict[str, Any]:
    """summary.json of the run in `folder`."""
    return read_record(folder / SUMMARY)


def config_of_model(model: Path) -> dict[str, Any]:
    """config.json of the run that trained a model, given its folder, or the last or best model in it; else empty."""
    folder = model if model.is_dir() else model.parent
    is_its_own = model.is_dir() or model.name in (BEST_MODEL, LAST_MODEL)
    return read_config(folder) if is_its_own and is_run(folder) else {}


def trained_classes(model: Path) -> list[str] | None:
    """Names of the classes that it was trained on, in the order of the outputs; None if they are not known."""
    return (config_of_model(model).get("images") or {}).get("class_names")


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file with a header line."""
    with path.open(newline="", encoding="utf-8") as file:
        return [*csv.DictReader(file)]


def is_run(folder: Path) -> bool:
    return (folder / CONFIG).exists()


def is_finished(folder: Path) -> bool:
    return (folder / SUMMARY).is_file()


def goes_on(settings: Settings) -> bool:
    """Whether these settings give the finished run in their folder a new schedule."""
    was = read_settings(settings.folder)
    return (settings.num_epochs, settings.deadline) != (was.num_epochs, was.deadline)
