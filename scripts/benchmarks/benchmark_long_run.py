#!/usr/bin/env python
"""Does the memory of a long run grow? The digits, elastically, with many selections, validations and checkpoints.

`main.py` trains in a process of its own, whose resident memory is read every second. The aim is that its median in
the last tenth of the epochs, each of which has a selection, is at most 5 % above that between the tenth and the
twentieth. The run is stopped when it has lasted as long, and has as many epochs, as you say.

    python scripts/benchmarks/benchmark_long_run.py --minutes 120
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common  # first: it sets the import path
import numpy as np
from common import Setting

from elastic_trainer.errors import UserError
from elastic_trainer.runs.reader import METRICS, read_rows
from elastic_trainer.system_memory import numbers_in

SETTLED = 10  # epochs after which memory is to stay
MAX_EPOCHS = 100_000


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run it, and sum up."""
    logdir = Path(tempfile.mkdtemp())
    flags = ["--dataset_name", "digits", "--num_epochs", MAX_EPOCHS, "--interval", 1, "--save_model"]
    flags += ["--checkpoint_minutes", 0.1]
    words = [sys.executable, common.ROOT / "main.py", *flags, "--logdir", logdir, "--run_name", "long"]
    folder, start = logdir / "long", time.monotonic()
    found: list[tuple[int, float]] = []  # finished epochs, and MB
    with (logdir / "output.txt").open("wb") as log, subprocess.Popen([*map(str, words)], stdout=log, stderr=log) as run:
        try:
            while not found or found[-1][0] < args.epochs or time.monotonic() - start < 60 * args.minutes:
                time.sleep(1)
                if run.poll() is not None:
                    last_line = (logdir / "output.txt").read_text().strip().splitlines()[-1]
                    raise UserError(f"the run ended by itself: {last_line}")
                kilobytes = numbers_in(Path(f"/proc/{run.pid}/status")).get("VmRSS:")
                if kilobytes and (folder / METRICS).is_file():
                    found.append((len(read_rows(folder / METRICS)), kilobytes / 1e3))
        finally:
            run.terminate()
    counts, megabytes = np.array(found).T
    last = counts.max()
    early = np.median(megabytes[(counts >= SETTLED) & (counts < 2 * SETTLED)])
    late = np.median(megabytes[counts > 0.9 * last])
    return {
        "selections": int(last),
        "minutes": round((time.monotonic() - start) / 60, 1),
        "steps": int(read_rows(folder / METRICS)[-1]["step"]),
        "after_tenth_mb": float(early),
        "at_end_mb": float(late),
        "growth_percent": float(100 * (late / early - 1)),
        "by_selection_mb": [float(np.median(megabytes[counts == k])) for k in np.unique(counts)],
    }


SETTINGS = {
    "minutes": Setting(120.0, 0.0, "at least"),
    "epochs": Setting(100, 20, "at least, of one selection each"),
}


if __name__ == "__main__":
    common.run_benchmark(__doc__, SETTINGS, measure, takes_network=False)
