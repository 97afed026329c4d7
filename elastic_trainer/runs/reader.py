"""Reads what runs left in their folders."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np


def latest_importance(logdir: Path, names: Sequence[str]) -> tuple[np.ndarray, Path] | None:
    """Importance [N] that the newest elastic run of this network under `logdir` measured last, and its file.

    Args:
        logdir: the folder of runs.
        names: of the network's trainable tensors, in their order.
    """
    files = [path for path in logdir.glob("*/selections.csv") if path.is_file()]
    for path in sorted(files, key=lambda path: path.stat().st_mtime, reverse=True):
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))[-len(names) :]
        try:
            if [row["name"] for row in rows] == list(names):
                return np.array([float(row["importance"]) for row in rows]), path
        except (KeyError, ValueError):
            continue  # a run of a scheme that measures no importance
    return None
