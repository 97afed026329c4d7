"""What a board will need for an exported folder: room on its disk, and memory, which its own program takes here."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from elastic_trainer.machine import (
    can_reset_peak,
    in_own_process,
    peak_memory_mb,
    reset_peak,
    resident_memory_mb,
    silenced,
)

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

PROGRAM_MB = 50  # Python with NumPy, Pillow and LiteRT, before a network is loaded (x86-64)


def needs_line(folder: Path, photos: int) -> str:
    """One line: the disk that the features of `photos` take, and the memory of the selection that trains most tensors.

    Args:
        folder: an export.
        photos: to train and to test on.
    """
    record = json.loads((folder / "board.json").read_text(encoding="utf-8"))
    largest = max(record["selections"], key=lambda one: one["trained_tensors"])
    features_mb = photos * max(_features_mb(record, one) for one in record["selections"])
    found = f"the board needs up to {features_mb:,.0f} MB on its disk for what it computes of {photos:,} photos"
    memory_mb = _memory_mb(folder, record, largest)
    if memory_mb is None:
        return found
    return f"{found}, and about {PROGRAM_MB + memory_mb:.0f} MB of memory (to train {largest['name']})"


def _features_mb(record: dict[str, Any], selection: dict[str, Any]) -> float:
    """Features of a photo, in each of its views."""
    values = sum(math.prod(shape) for shape in selection["features"].values())
    return (2 if record["recipe"]["augment"] == "flip" else 1) * 4 * values / 1e6


def _memory_mb(folder: Path, record: dict[str, Any], selection: dict[str, Any]) -> float | None:
    """Peak of a process that does what a board does, above what it takes before; None if that cannot be measured."""
    if not can_reset_peak():
        return None
    try:
        with silenced():  # where this fails, nothing is known of the memory
            return float(in_own_process(_send_memory, folder, record, selection))
    except EOFError:
        return None


def _send_memory(sender: Connection, folder: Path, record: dict[str, Any], selection: dict[str, Any]) -> None:
    """Load the network for the features, then that for training, as board_train.py does it."""
    sys.path.insert(0, str(folder))
    if importlib.util.find_spec("ai_edge_litert") is None:  # TensorFlow has the same interpreter
        import tensorflow as tf

        module = ModuleType("ai_edge_litert.interpreter")
        module.Interpreter = tf.lite.Interpreter  # type: ignore[attr-defined]
        sys.modules.update({"ai_edge_litert": module, "ai_edge_litert.interpreter": module})
    import numpy as np

    network_type = importlib.import_module("board_network").Network
    before_mb = resident_memory_mb() or 0.0
    reset_peak()
    images = np.zeros((record["part"], record["size"], record["size"], 3), np.float32)
    features = network_type(record, selection, 1).call("features", images=images)
    network, batch = network_type(record, selection, 1), record["recipe"]["batch_size"]
    network.step([(features, np.zeros(record["part"], np.int32), 1 / batch)] * -(-batch // record["part"]), 0.0, 0)
    network.infer(features)
    kept = [network.call("state") for _ in range(2)]  # the best weights, and what a checkpoint gets
    if record["offsets"] is not None:
        network.call("fill")
    sender.send((peak_memory_mb() or 0.0) - before_mb)
    del kept
