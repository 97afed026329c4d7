"""What a board needs for an exported folder: room on its disk, and memory, measured by its own program here."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from elastic_trainer.system.machine import can_reset_peak, in_own_process, reset_peak, silenced
from elastic_trainer.system.memory import peak_memory_mb, resident_memory_mb

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

PROGRAM_MB = 50  # Python with NumPy, Pillow and LiteRT, before a network is loaded (x86-64)


def needs_line(folder: Path, photos: int) -> str:
    """One line: the disk that the features of all photos take, and the memory of the largest selection."""
    record = json.loads((folder / "board.json").read_text(encoding="utf-8"))
    largest = max(record["selections"], key=lambda one: one["trained_tensors"])
    values = max(sum(map(math.prod, one["features"].values())) for one in record["selections"])
    views = 2 if record["recipe"]["augment"] == "flip" else 1
    disk_mb, text = photos * views * 4 * values / 1e6, ""
    if can_reset_peak() and "litert" in record["parts"]:
        try:
            with silenced():  # where this fails, nothing is known of the memory
                memory_mb = PROGRAM_MB + in_own_process(_send_memory, folder, record, largest)
            text = f", and about {memory_mb:.0f} MB of memory (to train {largest['name']})"
        except EOFError:
            pass
    return f"the board needs up to {disk_mb:,.0f} MB on its disk for what it computes of {photos:,} photos{text}"


def _send_memory(sender: Connection, folder: Path, record: dict[str, Any], selection: dict[str, Any]) -> None:
    """Load the network for the features, then that for training, as board_train.py does it; send the peak in MB."""
    sys.path.insert(0, str(folder))
    if importlib.util.find_spec("ai_edge_litert") is None:  # TensorFlow has the same interpreter
        import tensorflow as tf

        module = ModuleType("ai_edge_litert.interpreter")
        module.Interpreter = tf.lite.Interpreter  # type: ignore[attr-defined]
        sys.modules.update({"ai_edge_litert": module, "ai_edge_litert.interpreter": module})
    import numpy as np

    network_type, engine = importlib.import_module("board_network").Network, importlib.import_module("board_engines")
    before_mb = resident_memory_mb() or 0.0
    reset_peak()
    part, batch = record["parts"]["litert"], record["recipe"]["batch_size"]
    images = np.zeros((part, record["size"], record["size"], 3), np.float32)
    features = network_type(engine.LiteRT(record, 1), selection).call("features", images=images)
    network = network_type(engine.LiteRT(record, 1), selection)
    network.step([(features, np.zeros(part, np.int32), 1 / batch)] * -(-batch // part), 0.0, 0)
    network.infer(features)
    kept = [network.call("state") for _ in range(2)]  # the best weights, and what a checkpoint gets
    if record["offsets"] is not None:
        network.call("fill")
    sender.send((peak_memory_mb() or 0.0) - before_mb)
    del kept
