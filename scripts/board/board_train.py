#!/usr/bin/env python3
"""Trains the network of train.tflite in LiteRT. Needs Python 3.9, NumPy, Pillow and ai-edge-litert.

    python3 board_train.py --data_dir photos         # a folder for each class; or train/, val/, test/ with such folders
    python3 board_train.py --data_dir photos.tar     # a tar archive of such a folder
    python3 board_train.py --profile                 # measure this board, which needs no photos

The files beside this one are from `main.py --export train_tflite`. The output folder gets model.tflite, which predicts
on the board, and weights.npz, which `main.py --load_board` turns into a Keras model. See docs/small_boards.md.
"""

import argparse
import json
import math
import signal
import sys
import time
from pathlib import Path
from typing import Any, Dict  # Python 3.9

from board_device import (
    HERE,
    START,
    fail,
    first_line,
    left,
    lock,
    read_json,
    read_record,
    replace_file,
    show,
    write_json,
)

try:
    import numpy as np
    from board_memory import peak_memory_mb
    from board_network import Network, profile
    from board_photos import Examples, find_photos
except ImportError as missing:
    sys.exit(f"board_train.py: error: {missing}; run: pip install numpy pillow ai-edge-litert")

CHECKPOINT_SECONDS = 120  # between two of them


class Run:
    """One run: where it is, its history, its best weights. The checkpoint holds all of it.

    `finishing` are the seconds that writing the results takes, by what the last checkpoint took.
    """

    def __init__(self, record, selection, output, args):
        self.created = self.saved = time.monotonic()
        given = {name: getattr(args, name) for name in ("num_epochs", "learning_rate") if getattr(args, name)}
        self.recipe, self.args, self.path = {**record["recipe"], **given}, args, output / "checkpoint.npz"
        self.network, self.batch = Network(record, selection, args.threads), self.recipe["batch_size"]
        self.key = json.loads(json.dumps([record["id"], None, selection["name"], self.recipe]))
        self.best, self.signal, self.first_step_seconds, self.finishing = {}, 0, None, None
        self.state: Dict[str, Any] = {"step": 0, "seconds": 0.0, "validation": [], "epochs": [], "sums": [0.0, 0.0]}
        self.state.update(ended=False, best=None)  # True: only the results are left to write; of the best weights
        self.model_bytes = 0 if record["offsets"] is None else (HERE / "inference.tflite").stat().st_size

    def give(self, examples):
        """What it trains on."""
        self.examples, self.key[1] = examples, examples.fingerprint
        self.epoch_steps = len(examples.train) // self.batch
        if not self.epoch_steps:
            fail(f"--data_dir: has {len(examples.train)} photos to train on, and a step takes {self.batch}; add some")
        self.planned = self.epoch_steps * self.recipe["num_epochs"]
        self.state.update(steps=self.planned, planned=self.planned, test_photos=len(examples.test))

    def save(self):
        start = time.monotonic()
        arrays = {f"now/{name}": value for name, value in self.network.call("state").items()}
        arrays.update({f"best/{name}": value for name, value in self.best.items()})
        about = np.frombuffer(json.dumps({"key": self.key, "state": self.state}).encode(), np.uint8)
        replace_file(self.path, lambda file: np.savez(file, about=about, **arrays))
        self.saved = time.monotonic()
        # Another such file, half of it as weights, and the network.
        self.finishing = (self.saved - start) * (2 + self.model_bytes / self.path.stat().st_size)

    def load(self, about, arrays):
        """Continue from a checkpoint; from its end if only the results are left to write."""
        if self.key[1] is None:
            self.key[1] = about["key"][1]
        if about["key"] != self.key:
            fail(f"--resume: {self.path} is of other photos, another export or other flags; give the same")
        self.state.update(about["state"])
        self.network.call("load", **{name[4:]: value for name, value in arrays.items() if name.startswith("now/")})
        self.best = {name[5:]: value for name, value in arrays.items() if name.startswith("best/")}

    def go_on(self):
        """Plan all steps again: a deadline counts from the start of this program. An epoch that the last one cut short
        goes on."""
        state = self.state
        state["steps"], state["ended"] = self.planned, False
        steps = state["step"] - self.epoch_steps * (len(state["epochs"]) - 1)
        if 0 < steps < self.epoch_steps:
            row = state["epochs"].pop()
            state["sums"] = [steps * row["train_loss"], steps * row["train_accuracy"]]

    def rate(self):
        """A linear rise over a share of the planned steps, then half a cosine to 0."""
        step, peak, rise = self.state["step"], self.recipe["learning_rate"], round(self.recipe["warmup"] * self.planned)
        rise = max(min(rise, self.planned - 1), 0)
        done = min((step - rise) / max(self.state["steps"] - rise, 1), 1)
        return peak * (step + 1) / rise if step < rise else peak * 0.5 * (1 + math.cos(math.pi * done))

    def train(self):
        state, seed = self.state, self.recipe["seed"]
        while not self.signal:
            done = len(state["epochs"]) * self.epoch_steps
            if done < state["step"] and (state["step"] % self.epoch_steps == 0 or state["step"] >= state["steps"]):
                self.end_epoch()  # also of a run that was interrupted when only this was left
            if state["step"] >= state["steps"]:
                break
            epoch, first = divmod(state["step"], self.epoch_steps)
            order = np.random.default_rng([seed, epoch]).permutation(len(self.examples.train))
            views = np.random.default_rng([seed, epoch, 1]).integers(self.examples.views, size=len(order))
            for start in range(first * self.batch, self.epoch_steps * self.batch, self.batch):
                rows = order[start : start + self.batch]
                self.step(self.examples.train[rows], views[rows], [seed, state["step"]])
                if self.signal or state["step"] >= state["steps"]:
                    break
        if self.signal:
            self.save()

    def step(self, rows, views, seed):
        state, start, size = self.state, time.monotonic(), self.network.part
        places = (slice(first, first + size) for first in range(0, len(rows), size))
        read, labels = self.examples.read, self.examples.labels
        parts = ((read(rows[one], views[one]), labels[rows[one]], 1 / len(rows)) for one in places)
        found = self.network.step(parts, self.rate(), seed)
        if not math.isfinite(found[0]):
            fail(f"the loss is {found[0]} at step {state['step']}; start again with a smaller --learning_rate")
        state["step"], state["sums"] = state["step"] + 1, (found + state["sums"]).tolist()
        state["seconds"] += time.monotonic() - start
        self.first_step_seconds = self.first_step_seconds or time.monotonic() - self.created
        done, step_s = (state["step"] - 1) % self.epoch_steps + 1, state["seconds"] / state["step"]
        if self.args.deadline:
            if self.finishing is None:
                self.save()  # which shows how fast the disk is
            testing = max(state["validation"], default=len(self.examples.test) / self.batch * step_s)
            testing *= 1 + len(self.examples.held_out) / len(self.examples.test)
            spare = self.time_left() - testing
            state["steps"] = min(self.planned, state["step"] + int(max(spare, 0) / step_s))
        loss, accuracy = (total / done for total in state["sums"])
        left = (state["steps"] - state["step"]) * step_s
        show(
            f"epoch {len(state['epochs']) + 1} of {self.recipe['num_epochs']}, step {done} of {self.epoch_steps}: "
            f"loss {loss:.3f}, accuracy {accuracy:.1%}, {1e3 * step_s:.1f} ms a step, {left:.0f} s left"
        )
        if time.monotonic() - self.saved > CHECKPOINT_SECONDS:
            self.save()

    def time_left(self):
        """Seconds until the results must be written."""
        return left(self.args.deadline) - (self.finishing or 0)

    def has_time(self):
        return self.time_left() > 0

    def end_epoch(self):
        """Validate, unless that would take more than its share of the time, and keep the best weights."""
        state, start = self.state, time.monotonic()
        steps = state["step"] - self.epoch_steps * len(state["epochs"])
        row = {"train_loss": state["sums"][0] / steps, "train_accuracy": state["sums"][1] / steps}
        spent = state["validation"]
        share, seconds = self.recipe["validation_share"], state["seconds"]
        is_last = state["step"] >= state["steps"]
        if is_last or share >= 1 or not spent or sum(spent) + 2 * spent[-1] <= share * seconds:
            found = self.network.validate(self.examples, self.examples.test, self.has_time)
            row["test_loss"], row["test_accuracy"], tested = found
            if tested < state["test_photos"]:  # the deadline came first
                row["tested"] = tested
            spent.append(time.monotonic() - start)
            if state["best"] is None or row["test_accuracy"] > state["best"]["accuracy"]:
                state["best"] = {"accuracy": row["test_accuracy"], "tested": tested}
                self.best = {name: value for name, value in self.network.call("state").items() if "weights" in name}
        state["epochs"], state["sums"] = [*state["epochs"], row], [0.0, 0.0]
        show("", end="")
        found = ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in row.items())
        print(f"epoch {len(state['epochs'])}: {found}, {state['seconds']:.1f} s", flush=True)

    def test(self):
        """Test the best weights on the photos that were not used to choose them, if there are any."""
        if len(self.examples.held_out):
            now = self.network.call("state")
            self.network.call("load", **{**now, **self.best})
            self.state["held_out"] = self.network.validate(self.examples, self.examples.held_out, self.has_time)
            self.network.call("load", **now)  # `--resume` may go on from them


def finish(run, record, output):
    """Write the best weights, the file for inference that has them, and the results.

    The features go first, so that a full disk has room. The checkpoint is enough for `--resume` to do this again.
    """
    state = run.state
    if not state["ended"]:
        run.test()
        state["ended"] = True
    run.save()
    for name in ("features.json", "features.bin"):
        (output / name).unlink(missing_ok=True)
    run.network.call("load", **{**run.network.call("state"), **run.best})
    replace_file(output / "weights.npz", lambda file: np.savez(file, id=np.array(record["id"]), **run.best))
    if record["offsets"] is not None:
        content, arrays = bytearray((HERE / "inference.tflite").read_bytes()), run.network.call("fill")
        for index, offset in enumerate(record["offsets"]):
            encoded = arrays[f"array_{index}"].tobytes()
            content[offset : offset + len(encoded)] = encoded
        replace_file(output / "model.tflite", lambda file: file.write(content))
    accuracies = [one["test_accuracy"] for one in state["epochs"] if "test_accuracy" in one]
    count = state["best"]["tested"]
    result = {
        "best_accuracy": state["best"]["accuracy"],
        "final_accuracy": accuracies[-1],
        "tested": count,
        "steps": state["step"],
        "planned_steps": state["planned"],
        "train_seconds": state["seconds"],
        "first_step_seconds": run.first_step_seconds,
        "seconds": time.monotonic() - START,
        "peak_memory_mb": peak_memory_mb() or math.nan,
        "recipe": run.recipe,
        "epochs": state["epochs"],
    }
    if state.get("held_out"):
        result["test_loss"], result["test_accuracy"], result["test_photos"] = state["held_out"]
        print(f"test accuracy {result['test_accuracy']:.1%} on {result['test_photos']} photos not used to choose it")
    write_json(output / "result.json", result)
    is_early = state["step"] < state["planned"]
    if not is_early:
        run.path.unlink()
    print(f"{output}: accuracy {result['best_accuracy']:.1%} on {count} photos, ", end="")
    print(f"{result['seconds']:.0f} s, {result['peak_memory_mb']:.0f} MB; main.py --load_board takes weights.npz")
    if is_early:
        print(f"the deadline ended it after {state['step']} of {state['planned']} steps; continue with --resume")


# --- the command ------------------------------------------------------------------------------------------------------


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
        if times["id"] == record["id"]:
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
    add("--threads", type=int, default=1, metavar="N", help="default: %(default)s")
    add("--skip_broken", action="store_true", help="leave out photos that cannot be decoded")
    add("--resume", action="store_true", help="continue the run in the output folder, if there is one")
    add("--overwrite", action="store_true", help="replace the run in the output folder")
    add("--profile", action="store_true", help="measure the selections on this board, and stop")
    args = parser.parse_args()
    for name in ("num_epochs", "learning_rate", "deadline", "threads"):
        if getattr(args, name) is not None and not 0 < getattr(args, name) < 1e9:
            fail(f"--{name}: must be above 0 and below 1e9, not {getattr(args, name):g}")
    if args.test_fraction is not None and not 0 < args.test_fraction <= 0.9:
        fail(f"--test_fraction: must be above 0 and at most 0.9, not {args.test_fraction:g}")
    if args.data_dir is None and not args.profile:
        fail("--data_dir: is missing; give the folder with the photos")
    return args


def read_checkpoint(path):
    try:
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
        return json.loads(arrays.pop("about").tobytes()), arrays
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
        for name in ("checkpoint.npz", "weights.npz", "model.tflite", "result.json"):
            (output / name).unlink(missing_ok=True)
    if about is not None:
        run.load(about, arrays)
        run.go_on()
        run.save()
        (output / "result.json").unlink(missing_ok=True)
    others = f"{len(examples.test)} to test on"
    if len(examples.held_out):
        others = f"{len(examples.test)} to choose the best model by, {len(examples.held_out)} to test on"
    steps = f"{run.state['steps']} steps, {selection['trained_tensors']} tensors ({selection['name']})"
    print(f"{len(examples.train)} photos to train on, {others}; {steps}", flush=True)
    return run


def main():
    record = read_record()
    args = parsed(record)
    if args.profile:
        sys.exit(profile(record, args.threads))
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
    finish(run, record, output)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except OSError as error:  # such as a file system that is read-only
        fail(f"{error.filename}: {error.strerror}")
    except (MemoryError, RuntimeError) as error:  # LiteRT raises the second
        fail(f"{first_line(error)}: if memory ran out, export again with a smaller --micro_batch")
