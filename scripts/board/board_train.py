#!/usr/bin/env python3
"""Trains the network of this folder. Needs Python 3.6, NumPy, Pillow, and ai-edge-litert or TensorFlow 2.6 or later.

    python3 board_train.py --data_dir photos         # a folder for each class; or train/, val/, test/ with such folders
    python3 board_train.py --data_dir photos.tar     # a tar archive of such a folder
    python3 board_train.py --profile                 # measure this board, which needs no photos

The files beside this one are from `main.py --export train_tflite` or `train_graph`. The output folder gets
model.tflite, which predicts on the board, and weights.npz, which `scripts/board/load.py` turns into a Keras model. See
docs/small_boards.md.
"""

import argparse
import json
import signal
import sys
from pathlib import Path

from board_device import HERE, fail, first_line, left, lock, read_json, read_record, remove

try:
    import numpy as np
    from board_engines import ENGINES, find_engine
    from board_network import profile
    from board_photos import Examples, find_photos
    from board_run import Run
except ImportError as missing:
    sys.exit(f"board_train.py: error: {missing}; run: pip install numpy pillow")


def duration(text):
    unit = {"s": 1, "m": 60, "h": 3600}.get(text[-1:])
    return float(text[:-1]) * unit if unit else float(text)


def chosen_selection(record, photos, output, args):
    """What trains: as given; as before; or the largest selection whose steps, by times.json, end by the deadline."""
    selections = {one["name"]: one for one in record["selections"]}
    known, measured = output / "features.json", HERE / "times.json"
    if args.selection is None and args.resume and known.exists():
        args.selection = read_json(known, "delete it, and photos are read again")["key"][1]
    if args.selection is None and args.deadline and measured.exists():
        times, recipe = read_json(measured, "measure again with --profile"), record["recipe"]
        epochs, seconds = args.num_epochs or recipe["num_epochs"], left(args.deadline)
        if [times["id"], times.get("engine")] == [record["id"], args.engine.name]:
            rows, batch = times["selections"], times["batch_size"]
            needed = {one["name"]: epochs * one["step_ms"] / batch + 2 * one["features_ms"] for one in rows}
            fits = [name for name, photo_ms in needed.items() if len(photos) * photo_ms < 1e3 * seconds]
            quickest = min(rows, key=lambda one: one["step_ms"])["name"]
            args.selection = max(fits, key=lambda name: selections[name]["trained_tensors"], default=quickest)
    return selections.get(args.selection, record["selections"][0])


class Parser(argparse.ArgumentParser):
    def error(self, message):
        fail(message)


def parsed(record):
    parser = Parser(prog="board_train.py", description=__doc__.splitlines()[0])
    recipe = record["recipe"]
    add = parser.add_argument
    add("--data_dir", type=Path, metavar="DIR", help="photos: a folder, or a tar archive of it")
    add("--output", type=Path, default=HERE / "trained", metavar="DIR", help="default: %(default)s")
    names = [one["name"] for one in record["selections"]]
    text = f"what trains (default: {names[0]}; with --deadline and after --profile, the largest that fits)"
    add("--selection", choices=names, help=text)
    add("--num_epochs", type=int, metavar="N", help=f"default: {recipe['num_epochs']}")
    add("--learning_rate", type=float, metavar="RATE", help=f"default: {recipe['learning_rate']:g}")
    add("--test_fraction", type=float, metavar="SHARE", help="of the photos, if there is no folder test")
    add("--deadline", type=duration, metavar="TIME", help="end by then: seconds, or 90m, or 2.5h")
    add("--engine", choices=[*ENGINES], help="what computes (default: the first of them that is installed)")
    add("--threads", type=int, metavar="N", help="default: 1 in LiteRT, all in TensorFlow")
    add("--checkpoint_minutes", type=float, default=2, metavar="N", help="what a power cut may lose (default: 2)")
    add("--skip_broken", action="store_true", help="leave out photos that cannot be decoded")
    add("--resume", action="store_true", help="continue the run in the output folder, if there is one")
    add("--overwrite", action="store_true", help="replace the run in the output folder")
    add("--profile", action="store_true", help="measure the selections on this board, and stop")
    args = parser.parse_args()
    for name in ("num_epochs", "learning_rate", "deadline", "threads"):
        if getattr(args, name) is not None and not 0 < getattr(args, name) < 1e9:
            fail(f"--{name}: must be above 0 and below 1e9, not {getattr(args, name):g}")
    if not 0 <= args.checkpoint_minutes < 1e9:
        fail(f"--checkpoint_minutes: must be at least 0, not {args.checkpoint_minutes:g}")
    if args.test_fraction is not None and not 0 < args.test_fraction <= 0.9:
        fail(f"--test_fraction: must be above 0 and at most 0.9, not {args.test_fraction:g}")
    if args.data_dir is None and not args.profile:
        fail("--data_dir: is missing; give the folder with the photos")
    args.engine = find_engine(record, args.engine)
    return args


def read_checkpoint(path):
    try:
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
        about = json.loads(arrays.pop("about").tobytes())
        if about.get("arrays", len(arrays)) != len(arrays):  # zip has no checksum of its list of contents
            raise ValueError("arrays are missing")
        return about, arrays
    except Exception as error:  # zipfile and NumPy raise many types
        fail(f"--resume: {path} cannot be read ({error}); start again with --overwrite")


def prepared(record, output, args):
    """A run, new or continued, that is ready to train, or has ended but for its results."""
    checkpoint, has_results = output / "checkpoint.npz", (output / "result.json").exists()
    about, arrays = read_checkpoint(checkpoint) if args.resume and checkpoint.exists() else (None, None)
    if about is not None:
        args.selection = args.selection or about["key"][2]
    if about is not None and about["state"].get("ended") and not has_results:  # photos are not needed
        run = Run(record, chosen_selection(record, (), output, args), output, args)
        run.load(about, arrays)
        return run
    photos = find_photos(args.data_dir, record["classes"])
    selection = chosen_selection(record, photos, output, args)
    examples = Examples(photos, record, selection, output, args)
    run = Run(record, selection, output, args)
    run.give(examples)
    if args.overwrite:  # the photos are in order
        remove(*(output / name for name in ("checkpoint.npz", "weights.npz", "model.tflite", "result.json")))
    if about is not None:
        run.load(about, arrays)
        run.go_on()
        run.save()
        remove(output / "result.json")
    others = f"{len(examples.test)} to test on"
    if len(examples.held_out):
        others = f"{len(examples.test)} to choose the best model by, {len(examples.held_out)} to test on"
    steps = f"{run.state['steps']} steps, {selection['trained_tensors']} tensors ({selection['name']})"
    print(f"{len(examples.train)} photos to train on, {others}; {steps}; {run.network.engine.about()}", flush=True)
    return run


def main():
    record = read_record()
    args = parsed(record)
    if args.profile:
        sys.exit(profile(record, args.engine, args.threads))
    output, checkpoint = args.output, args.output / "checkpoint.npz"
    if args.overwrite and args.resume:
        fail("--overwrite: cannot be combined with --resume; leave one of them out")
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"--output {output}: cannot be made: {error.strerror}")
    lock(output)
    if (output / "result.json").exists() and not (args.overwrite or (args.resume and checkpoint.exists())):
        fail(f"--output {output}: has a finished run; give another folder, or --overwrite")
    if checkpoint.exists() and not (args.resume or args.overwrite):
        fail(f"--output {output}: has an unfinished run; continue it with --resume, or replace it with --overwrite")
    run = prepared(record, output, args)

    def stop(number, _):
        run.signal = number
        signal.signal(number, signal.SIG_DFL)  # the next one stops at once

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    if not run.state["ended"]:
        run.train()
    if run.signal:
        print(f"\nboard_train.py: stopped after step {run.state['step']}; continue with --resume", file=sys.stderr)
        sys.exit(128 + run.signal)
    run.finish()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except OSError as error:  # such as a file system that is read-only
        fail(f"{error.filename}: {error.strerror}")
    except (MemoryError, RuntimeError) as error:  # engines raise the second
        fail(f"{first_line(error)}: if memory ran out, export again with a smaller --micro_batch")
