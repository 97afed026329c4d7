"""Reads the files in run folders: config.json, summary.json, metrics.csv, selections.csv."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from elastic_trainer.datasets.layout import class_name
from elastic_trainer.errors import UserError
from elastic_trainer.files import OBJECT, TEXT, TRUTH, Kinds, nullable, number, read_json, reading, require, text
from elastic_trainer.settings import BEST_MODEL, LAST_MODEL

CONFIG, SUMMARY, METRICS, SELECTIONS = "config.json", "summary.json", "metrics.csv", "selections.csv"
# Flags of earlier versions. A run that was started with one that changes training is not trained further.
FORMER_FLAGS = {"--allow_tensorflow_kernels", "--checkpoint_steps"}
FORMER_TRAINING = {"--cached_views", "--warmup", "--validation_share", "--average_head", "--grace", "--message_seconds"}
FORMER_TRAINING |= {"--prune_interval", "--prune_ratio", "--prune_threshold"}

_NAME = text(r"\w+")  # another program may have registered its schemes and data sets
_SIZE, _COUNT = number(1, kind=int), number(0, kind=int)
_SHARE, _POSITIVE, _QUANTITY = number(0, 1), number(0, above=True), number(0)

# What must be in the files if it is there; tests and runs of earlier versions leave fields out.
CONFIG_FIELDS: dict[str, Kinds] = {
    "command?": [TEXT],
    **dict.fromkeys(("model_name?", "data_dir?", "run_name?", "weights?", "run_id?"), TEXT),
    **dict.fromkeys(("dataset_name?", "train_type?"), _NAME),
    **dict.fromkeys(("input_size?", "num_classes?", "batch_size?", "num_epochs?", "max_steps?"), _SIZE),
    **dict.fromkeys(("importance_batches?", "trained_layers?"), _SIZE),
    "alpha?": _POSITIVE,
    "seed?": _COUNT,
    "skip_broken?": TRUTH,
    "test_fraction?": number(0, 1, above=True),
    "environment?": OBJECT,
    "images?": {  # `datasets.image_data.ImageData.record`
        "class_names": [TEXT],
        **dict.fromkeys(("training_images", "test_images", "held_out_images?", "digests?"), TEXT),
    },
    "network?": dict.fromkeys(("inference", "training", "precision", "made_with"), TEXT),  # `config.network_record`
}
SUMMARY_FIELDS: dict[str, Kinds] = {  # `summary.run_results`
    "train_type": _NAME,
    "dataset_name?": _NAME,
    **dict.fromkeys(("model_name?", "time_over_full_missing?", "energy_missing?"), TEXT),
    **dict.fromkeys(("epochs", "steps", "planned_steps?"), _SIZE),
    **dict.fromkeys(("best_accuracy", "final_accuracy", "start_accuracy?", "test_accuracy?", "rho?"), _SHARE),
    "best_epoch?": _COUNT,
    **dict.fromkeys(("train_seconds", "rho_measured?", "time_over_full?"), _POSITIVE),
    "median_step_ms": nullable(_POSITIVE),
    **dict.fromkeys(("validation_seconds", "selection_seconds", "selection_percent"), _QUANTITY),
    **dict.fromkeys(("elapsed_seconds?", "wall_seconds?", "train_flops?", "energy_joules?"), _QUANTITY),
    **dict.fromkeys(("memory_budget_mb?", "start_memory_mb?", "predicted_memory_mb?"), _QUANTITY),
    **dict.fromkeys(("peak_memory_mb?", "gpu_peak_memory_mb?"), _QUANTITY),
    "training_spans?": [(number(), number())],
}


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of the run in `folder`, checked."""
    config = _read(folder / CONFIG, CONFIG_FIELDS)
    images = config.get("images") or {}
    if "class_names" in images:  # earlier versions kept them as the file system has them
        images["class_names"] = [class_name(name) for name in images["class_names"]]
    return config


def read_summary(folder: Path) -> dict[str, Any]:
    """summary.json of the run in `folder`, checked."""
    return _read(folder / SUMMARY, SUMMARY_FIELDS)


def config_of_model(model: Path) -> dict[str, Any]:
    """config.json of the run that trained a model, given its folder, or the last or best model in it; else empty."""
    folder = model if model.is_dir() else model.parent
    is_its_own = model.is_dir() or model.name in (BEST_MODEL, LAST_MODEL)
    return read_config(folder) if is_its_own and is_run(folder) else {}


def _read(path: Path, fields: dict[str, Kinds]) -> dict[str, Any]:
    try:
        return read_json(path, fields)
    except UserError as error:
        raise UserError(f"{error}; repair the file, or train again with --overwrite") from error


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file with a header line."""
    with path.open(newline="", encoding="utf-8") as file:
        return [*csv.DictReader(file)]


def read_epochs(folder: Path) -> list[dict[str, str]]:
    """The rows of metrics.csv of the run in `folder`; there must be some."""
    with reading(folder / METRICS):
        epochs = read_rows(folder / METRICS)
        if not epochs:
            raise ValueError("contains no epoch")
    return epochs


def is_run(folder: Path) -> bool:
    return (folder / CONFIG).exists()


def is_finished(folder: Path) -> bool:
    return (folder / SUMMARY).is_file()


def started_with(folder: Path) -> list[str]:
    """The command line that started the run in `folder`, in words, without flags of earlier versions.

    Raises:
        UserError: there is no run, or such a flag would change the rest of its training.
    """
    if not is_run(folder):
        raise UserError(f"--resume {folder}: contains no run (no config.json); give the folder of one, as logs/my_run")
    words: list[str] = []
    is_former = False
    for word in read_config(folder).get("command") or []:
        flag = word.partition("=")[0]
        if flag in FORMER_TRAINING and not is_finished(folder):
            raise UserError(
                f"--resume {folder}: was started with {flag}, which this version does not have; continue it with the "
                "version that started it, or start another run"
            )
        is_former = flag in FORMER_FLAGS | FORMER_TRAINING or (is_former and not word.startswith("--"))
        words += [] if is_former else [word]
    return words


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
        with reading(self.folder / METRICS):
            return [float(row[name]) if row.get(name) else np.nan for row in self.epochs]

    def selections(self) -> Selections:
        """What it selected. Raises `UserError` if selections.csv is damaged or has no selection."""
        path, epochs = self.folder / SELECTIONS, dict[str, list[tuple[bool, float]]]()
        with reading(path):
            for row in read_rows(path):
                require(row, dict.fromkeys(("epoch", "chosen", "importance"), TEXT))
                chosen = (row["chosen"] == "1", float(row["importance"] or "nan"))
                epochs.setdefault(row["epoch"], []).append(chosen)
            if len({*map(len, epochs.values())}) != 1:
                raise ValueError("must have as many rows for each selection, and at least one")
            table = np.array([*epochs.values()], float)
            return Selections(np.array([*epochs], float), table[:, :, 0] == 1, table[:, :, 1])


def read_run(folder: Path) -> FinishedRun:
    """The finished run in `folder`. Raises `UserError` if there is none."""
    try:
        summary, config, epochs = read_summary(folder), read_config(folder), read_epochs(folder)
    except UserError as error:
        raise UserError(f"{folder}: contains no finished run ({error})") from error
    return FinishedRun(folder, summary, config, [row for row in epochs if row.get("epoch") != "0"])


def latest_importance(logdir: Path, names: Sequence[str]) -> tuple[np.ndarray, Path] | None:
    """The last importance [N] of the newest elastic run under `logdir` with tensors of these names, and its file."""
    files = [path for path in logdir.glob(f"*/{SELECTIONS}") if path.is_file()]
    for path in sorted(files, key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            rows = read_rows(path)[-len(names) :]
            if [row["name"] for row in rows] == list(names):
                importance = np.array([float(row["importance"]) for row in rows])
                if np.isfinite(importance).all():
                    return importance, path
        except (OSError, KeyError, TypeError, ValueError, csv.Error):
            continue  # a run without importance, or a damaged file
    return None
