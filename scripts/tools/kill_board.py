#!/usr/bin/env python
"""Kill the program of an exported folder at random moments, continue it each time, and compare with an unbroken run.

After each kill, from the first model on, model.tflite must be a complete file that predicts. At the end, the weights
are those of a run that nothing interrupted, bit for bit where one thread computes. Runs are repeated until there were
as many kills. Prints one JSON object.

    python scripts/tools/kill_board.py logs/mine_board --data_dir photos --kills 20 --flags "--engine litert"
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np


def predicts(model: Path, size: int) -> bool:
    """Whether a .tflite file returns finite logits for an image."""
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_path=str(model))
    interpreter.allocate_tensors()
    interpreter.set_tensor(interpreter.get_input_details()[0]["index"], np.full((1, size, size, 3), 99, np.float32))
    interpreter.invoke()
    return bool(np.isfinite(interpreter.get_tensor(interpreter.get_output_details()[0]["index"])).all())


def largest_difference(one: Path, other: Path) -> float:
    """Of the weights of two runs, relative to the largest of each array."""
    with np.load(one) as found, np.load(other) as expected:
        names = [name for name in expected.files if name != "id"]
        pairs = [(found[name], expected[name]) for name in names]
    return max(float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-9)) for a, b in pairs)


def torture(args: argparse.Namespace) -> dict[str, Any]:
    """Run it unbroken, then again and again with `args.kills` kills in all; what was found."""
    size = json.loads((args.folder / "board.json").read_text(encoding="utf-8"))["size"]
    command = [args.python, args.folder / "board_train.py", "--data_dir", args.data_dir, *args.flags]
    command += ["--checkpoint_minutes", "0.02", "--resume"]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "start_new_session": True}
    kills, models, differences, equal, rng = 0, list[bool](), list[float](), list[bool](), random.Random(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        whole, start = Path(folder) / "whole", time.monotonic()
        subprocess.run([*command, "--output", whole], check=True, **quiet)
        seconds = time.monotonic() - start
        while kills < args.kills:
            broken = Path(folder) / f"broken_{len(differences)}"
            while not (broken / "result.json").exists():
                with subprocess.Popen([*command, "--output", broken], **quiet) as process:
                    try:
                        # Long enough that each start gets further than the last, on average.
                        lives = rng.uniform(0, seconds / 3) if kills < args.kills else None
                        error = process.communicate(timeout=lives)[1]
                    except subprocess.TimeoutExpired:
                        process.send_signal(signal.SIGKILL)
                        process.communicate()
                        kills += 1
                        if (broken / "model.tflite").exists():
                            models.append(predicts(broken / "model.tflite", size))
                        continue
                if process.returncode:
                    sys.exit(f"after {kills} kills: {error.decode().strip().splitlines()[-1]}")
            differences.append(largest_difference(broken / "weights.npz", whole / "weights.npz"))
            epochs = [
                json.loads((each / "result.json").read_text(encoding="utf-8"))["epochs"] for each in (whole, broken)
            ]
            equal.append(epochs[0] == epochs[1])
    return {
        "kills": kills,
        "runs": len(differences),
        "models_after_a_kill": len(models),
        "of_them_predict": sum(models),
        "unbroken_seconds": seconds,
        "largest_differences": differences,
        "equal_epochs": equal,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of --export train_tflite or train_graph")
    parser.add_argument("--data_dir", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--python", default=sys.executable, help="that runs the board's program")
    parser.add_argument("--flags", type=str.split, default=[], help="of board_train.py, in quotes")
    print(json.dumps(torture(parser.parse_args())))


if __name__ == "__main__":
    main()
