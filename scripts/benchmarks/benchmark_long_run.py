#!/usr/bin/env python
"""Does the memory of a long run grow? The digits, elastically, with many selections, validations and checkpoints.

`main.py` trains in a process of its own, whose resident memory is read every second. The aim is that its median after
the last tenth of the selections is at most 5 % above that between the tenth selection and the twentieth.

    python scripts/benchmarks/benchmark_long_run.py
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
from elastic_trainer.runs.reader import SELECTIONS, read_rows, read_summary
from elastic_trainer.system_memory import numbers_in

SETTLED = 10  # selections after which memory is to stay


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run it, and sum up."""
    logdir = Path(tempfile.mkdtemp())
    flags = ["--num_epochs", args.selections, "--interval", 1, "--checkpoint_minutes", 0.1, "--save_model"]
    words = [sys.executable, common.ROOT / "main.py", *flags, "--logdir", logdir, "--run_name", "long"]
    folder, start = logdir / "long", time.monotonic()
    found: list[tuple[int, float]] = []  # selections so far, and MB
    with (logdir / "output.txt").open("wb") as log, subprocess.Popen([*map(str, words)], stdout=log, stderr=log) as run:
        while run.poll() is None:
            time.sleep(1)
            kilobytes = numbers_in(Path(f"/proc/{run.pid}/status")).get("VmRSS:")
            if kilobytes and (folder / SELECTIONS).is_file():
                selections = {row["step"] for row in read_rows(folder / SELECTIONS)}
                found.append((len(selections), kilobytes / 1e3))
    if run.returncode:
        raise UserError(f"the run failed: {(logdir / 'output.txt').read_text().strip().splitlines()[-1]}")
    counts, megabytes = np.array(found).T
    last = counts.max()
    early = np.median(megabytes[(counts >= SETTLED) & (counts < 2 * SETTLED)])
    late = np.median(megabytes[counts > 0.9 * last])
    return {
        "selections": int(last),
        "minutes": round((time.monotonic() - start) / 60, 1),
        "steps": read_summary(folder)["steps"],
        "after_tenth_mb": float(early),
        "at_end_mb": float(late),
        "growth_percent": float(100 * (late / early - 1)),
        "by_selection_mb": [float(np.median(megabytes[counts == k])) for k in np.unique(counts)],
    }


SETTINGS = {"selections": Setting(100, 20, "one an epoch")}


if __name__ == "__main__":
    common.run_benchmark(__doc__, SETTINGS, measure, takes_network=False)
