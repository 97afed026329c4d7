#!/usr/bin/env python3
"""Trains the network of this folder. Needs Python 3.6, NumPy, Pillow, and ai-edge-litert or TensorFlow 2.6 or later.

    python3 board_train.py --data_dir photos         # a folder for each class; or train/, val/, test/ with such folders

The files beside this one are from `main.py --export board`. The output folder gets model.tflite, which predicts on the
board, and weights.npz, which `scripts/board/load.py` turns into a Keras model. See docs/small_boards.md.
"""

import argparse
import sys
from pathlib import Path

from board_device import HERE, catch_signals, fail, first_line, lock, read_record, say

try:
    from board_engines import ENGINES, find_engine
    from board_photos import Examples, photos_in
    from board_run import Run
except ImportError as missing:
    sys.exit(f"board_train.py: error: {missing}; run: pip install numpy pillow")


def duration(text):
    unit = {"s": 1, "m": 60, "h": 3600}.get(text[-1:])
    return float(text[:-1]) * unit if unit else float(text)


class Parser(argparse.ArgumentParser):
    def error(self, message):
        fail(message)


def parsed(record):
    parser = Parser(prog="board_train.py", description=__doc__.splitlines()[0])
    recipe, add = record["recipe"], parser.add_argument
    add("--data_dir", type=Path, metavar="DIR", required=True, help="photos: a folder for each class")
    add("--output", type=Path, default=HERE / "trained", metavar="DIR", help="default: %(default)s")
    add("--num_epochs", type=int, metavar="N", help=f"default: {recipe['num_epochs']}")
    add("--learning_rate", type=float, metavar="RATE", help=f"default: {recipe['learning_rate']:g}")
    add("--deadline", type=duration, metavar="TIME", help="end by then: seconds, or 90m, or 2.5h")
    add("--engine", choices=[*ENGINES], help="what computes (default: the first of them that is installed)")
    add("--threads", type=int, metavar="N", help="default: 1 in LiteRT, all in TensorFlow")
    add("--resume", action="store_true", help="continue the run in the output folder, if there is one")
    args = parser.parse_args()
    for name in ("num_epochs", "learning_rate", "deadline", "threads"):
        if getattr(args, name) is not None and not 0 < getattr(args, name) < 1e9:
            fail(f"--{name}: must be above 0 and below 1e9, not {getattr(args, name):g}")
    args.engine = find_engine(record, args.engine)
    return args


def main():
    catch_signals()
    record = read_record()
    args = parsed(record)
    output, checkpoint = args.output, args.output / "checkpoint.npz"
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"--output {output}: cannot be made: {error.strerror}")
    lock(output)
    if checkpoint.exists() and not args.resume:
        fail(f"--output {output}: has an unfinished run; continue it with --resume, or give another folder")
    if (output / "result.json").exists() and not checkpoint.exists():
        fail(f"--output {output}: has a finished run; give another folder")
    examples = Examples(photos_in(args.data_dir, record["classes"]), record, output, args)
    run = Run(record, output, args, args.engine(record, args.threads), examples)
    if checkpoint.exists():
        run.resume()
    others = f"{len(examples.test)} to test on"
    if len(examples.held_out):
        others = f"{len(examples.test)} to choose the best model by, {len(examples.held_out)} to test on"
    steps = f"{run.planned} steps, {len(record['variables'])} tensors"
    say(f"{len(examples.train)} photos to train on, {others}; {steps}; {run.network.about}")
    if not run.state["ended"]:
        run.train()
    run.finish()


if __name__ == "__main__":
    try:
        main()
    except OSError as error:  # such as a file system that is read-only
        fail(f"{error.filename}: {error.strerror}")
    except (MemoryError, RuntimeError) as error:  # engines raise the second
        fail(f"{first_line(error)}: if memory ran out, export again with a smaller --micro_batch")
