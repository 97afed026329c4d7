#!/usr/bin/env python
r"""One model from four boards, one of them 3 and one 6 times slower: by which rule is a fleet accurate first?

The boards train for the program's own server, one after the other in this process. A step takes what a timing table of
this machine says, times how much slower a board is (1, 1, 3, 6); messages take no time. So times do not depend on how
busy the machine is. Sign digits are divided by person. Of the classes of grocery, 0.4 are on all boards, and each other
one is on one board alone.

central     all photos on one board as fast as the fastest, a pass in each round: the accuracy to reach
waits       FedAvg: each board passes over its photos once, and the round lasts as long as the slowest takes
drops       FedAvg of the two fast boards; the photos of the slow ones are lost
same_rho    all boards train what the slowest can
fedel       FedEL (Zhang et al., arXiv 2509.16902) as far as a network without early exits allows: windows of blocks, in
            which a board's importance and that of all boards decide; measuring it takes no time here
ours        what `fleet.py` does
ours_short  the same with a shorter round: one pass of the fastest board over its photos instead of 1.3

    python scripts/benchmarks/benchmark_fleet.py --data_set grocery --data_root ../shared/data --weights FILE \
        --logdir logs
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import sys
import tempfile
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import common
import numpy as np
from common import Setting

sys.path.insert(0, str(common.ROOT / "scripts" / "study"))

import keras
from study_data import INPUT_SIZES, person_of, split_folder

import data
import models
from elastic_trainer.cli.resolve import resolve
from elastic_trainer.datasets.digests import digest
from elastic_trainer.datasets.image_data import ImageData
from elastic_trainer.evaluation.predictions import predict
from elastic_trainer.extensions.fleet.board import EPOCHS
from elastic_trainer.extensions.fleet.command_line import ServeCommand, parse_fleet, sent_words
from elastic_trainer.extensions.fleet.messages import About
from elastic_trainer.extensions.fleet.records import Records
from elastic_trainer.extensions.fleet.roster import Roster
from elastic_trainer.extensions.fleet.rounds import BoardSetup, RoundClock, RoundScheme
from elastic_trainer.extensions.fleet.server import PASSES, FleetServer, usual_round_seconds
from elastic_trainer.extensions.fleet.simulated import SimulatedBoard, simulation
from elastic_trainer.files import write_json
from elastic_trainer.networks.tensors import head_mask, tensor_names
from elastic_trainer.options import existing_file, folder
from elastic_trainer.selection.importance import ImportanceEvaluator
from elastic_trainer.selection.select import Plan, plan_of, select_tensors
from elastic_trainer.task import ImageClassification
from elastic_trainer.timing.table import TimingTable
from elastic_trainer.training.state import TrainState

SLOWER = (1.0, 1.0, 3.0, 6.0)
COMMON, LOCAL = 0.4, 0.6  # share of the classes that all boards have; weight of a board's own importance in FedEL
SHARES = (0.9, 0.95)  # of central training's accuracy, the time to which counts
BLOCK = re.compile(r"block_\d+|expanded_conv|Conv_?1")  # of MobileNetV2, in names of tensors; else layers are blocks


class OnePassBoard(SimulatedBoard):
    """Passes over its photos once in each round."""

    def train_steps(self, rate: float, max_steps: int = EPOCHS) -> int:
        return super().train_steps(rate, min(max_steps, self.trainer.data.steps_per_epoch))


class WindowScheme(RoundScheme):
    """Selects within a window that moves from round to round, by blended importance."""

    _start = 0  # of the next window

    of_boards: dict[int, np.ndarray] = {}  # noqa: RUF012 (shared: the latest importance of each board of the run)

    def __init__(self, setup: BoardSetup, clock: RoundClock) -> None:
        super().__init__(setup, clock)
        self._evaluator = ImportanceEvaluator(ImageClassification(setup.model), setup.data.batch_size)
        self._key = len(self.of_boards)
        self.of_boards[self._key] = np.zeros(len(self.head))

    def choose(self, rho: float, state: TrainState) -> Plan:
        table, data = self.table, self.setup.data
        batches = data.importance_batches(0, self.setup.settings.importance_batches)
        own = self.of_boards[self._key] = self._evaluator.importance(state.optimizer, batches)
        if rho >= 1:
            return plan_of(table, np.ones(len(self.head), bool), None, table.full_step_ms, 1.0)
        importance = LOCAL * own + (1 - LOCAL) * np.mean([*self.of_boards.values()], axis=0)
        mask, self._start = select_window(table, importance, self.head, rho, self._start)
        return plan_of(table, mask, None, rho * table.full_step_ms, 1.0)


class WindowBoard(SimulatedBoard):
    """A board of FedEL."""

    scheme = WindowScheme


class FedAvgServer(FleetServer):
    """Averages changes as they are."""

    normalised = False


class Rule(NamedTuple):
    """What the boards do in a round.

    Attributes:
        board: of which kind they are.
        server: how it averages.
        boards: how many take part, the fastest first.
        waits: each board has the time for all tensors.
        passes: else the length of a round: of the fastest board over its photos.
        is_alike: all boards are as slow as the slowest.
    """

    board: type[SimulatedBoard] = SimulatedBoard
    server: type[FleetServer] = FleetServer
    boards: int = len(SLOWER)
    waits: bool = False
    passes: float = PASSES
    is_alike: bool = False


RULES = {
    "central": Rule(OnePassBoard, boards=1, waits=True),
    "waits": Rule(OnePassBoard, FedAvgServer, waits=True),
    "ours": Rule(),
    "drops": Rule(server=FedAvgServer, boards=2),
    "same_rho": Rule(is_alike=True),
    "fedel": Rule(WindowBoard, FedAvgServer),
    "ours_short": Rule(passes=1.0),
}


def select_window(
    table: TimingTable, importance: np.ndarray, head: np.ndarray, rho: float, start: int
) -> tuple[np.ndarray, int]:
    """The tensors of a window of blocks, after FedEL (arXiv 2509.16902), and where the next window starts.

    A window has as many neighbouring blocks as the budget can train; importance selects among them. FedEL ends the
    network behind the window by an early exit. This network has none: the error goes all the way from the output to the
    window, which costs time beside the budget. The board makes fewer steps for it.

    Args:
        table: timing table of the network.
        importance, head: [N] over `model.trainable_variables`.
        rho: what a step may take beside the way to the window, as a share of a full one.
        start: first tensor of the window in backward order; the first window starts behind the head.

    Returns:
        bool [N], head included, and the next `start`, which is behind the head again after the deepest block.
    """
    blocks = [found[0] if (found := BLOCK.search(name)) else name.rpartition("/")[0] for name in table.names]
    t_dy_ms, first = table.wall_t_dy_ms(), table.depth(head)
    start, left_ms = max(start, first), rho * table.full_step_ms - table.predict_ms(head)
    end, own_ms = start, t_dy_ms + table.wall_t_dw_ms
    while end < len(blocks) and (left_ms > 0 or blocks[end] == blocks[end - 1] or end == start):
        left_ms -= own_ms[end]
        end += 1
    inside = np.zeros(len(blocks))
    inside[table.positions[start:end]] = importance[table.positions[start:end]]
    way_ms = float(t_dy_ms[first:start].sum())
    mask = select_tensors(table, inside, head, min(rho + way_ms / table.full_step_ms, 0.999)).mask
    return mask, end if end < len(blocks) else first


def by_person(persons: np.ndarray, seed: int) -> list[np.ndarray]:
    """The photos of each board, int arrays: those of a quarter of the `persons`, int [photos]."""
    order = np.random.default_rng(seed).permutation(np.unique(persons))
    return [np.flatnonzero(np.isin(persons, part)) for part in np.array_split(order, len(SLOWER))]


def by_class(labels: np.ndarray, seed: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The photos of each board, and the classes that are on it alone, int arrays.

    Args:
        labels: int [photos].
        seed: which classes are on all boards, and which on one.
    """
    rng = np.random.default_rng(seed)
    order = rng.permutation(np.unique(labels))
    own = np.array_split(order[round(COMMON * len(order)) :], len(SLOWER))
    owners = rng.permutation(np.arange(len(labels)) % len(SLOWER))
    for board, classes in enumerate(own):
        owners[np.isin(labels, classes)] = board
    return [np.flatnonzero(owners == board) for board in range(len(SLOWER))], own


def command_of(args: argparse.Namespace, seed: int) -> ServeCommand:
    """A fleet as `fleet.py simulate` trains it."""
    photos = split_folder(args.data_root, args.data_set, "test", args.logdir / "data_sets")
    words = ["simulate", "--dataset_name", "image_folder", "--data_dir", photos, "--weights", args.weights]
    words += ["--model_name", "mobilenetv2", "--alpha", args.alpha, "--input_size", INPUT_SIZES[args.data_set]]
    words += ["--batch_size", args.batch_size, "--rounds", args.fleet_rounds, "--seed", seed, "--logdir", args.logdir]
    command = parse_fleet([str(word) for word in words])
    assert isinstance(command, ServeCommand)
    return command


def carry_out(args: argparse.Namespace, run: tuple[str, int]) -> dict[str, Any]:
    """A fleet by the rule of this name and with this seed: what came of it, round by round."""
    name, seed = run
    rule, command = RULES[name], command_of(args, seed)
    photos = data.load(command.training.data, INPUT_SIZES[args.data_set], args.batch_size, seed)
    training, network = command.training.training, command.training.network.with_classes(photos.num_classes)
    model = models.build(network)
    table = resolve(command.training.with_classes(photos.num_classes), model, lambda *_: photos).table
    assert table is not None, "the scheme is elastic"
    parts, own, slower = _parts(args, photos, rule, name, seed)
    passes = [len(rows) // args.batch_size * table.full_step_ms / 1e3 for rows in parts]
    if rule.waits:
        seconds = 1.001 * max(times * one for times, one in zip(slower, passes, strict=True))
    else:
        share = table.predict_ms(head_mask(model)) / table.full_step_ms
        told = [
            About("", len(rows), 0, times * one, share * times * one)
            for rows, times, one in zip(parts, SLOWER, passes, strict=False)  # same_rho has rounds like ours
        ]
        seconds = usual_round_seconds(told, rule.passes)
    fleet = replace(command.fleet, boards=len(parts), round_seconds=seconds)
    WindowScheme.of_boards.clear()
    setup = BoardSetup(models.build(network), photos, table, training)
    link, clock = simulation(setup, parts, slower, lambda line: None, rule.board, message_seconds=0.0)
    hello = {"words": sent_words(command.training, photos.num_classes), "class_names": [*photos.class_names]}
    with tempfile.TemporaryDirectory() as place:
        records = Records(Path(place), command.config, tensor_names(model))

        def say(line: str) -> None:
            print(f"{name} {seed}: {line}", file=sys.stderr, flush=True)

        server = rule.server(Roster(link, say, clock), model, fleet, training.learning_rate, hello, records, photos)
        server.run()
        records.finish(server.seconds)
    return {
        "rule": name,
        "seed": seed,
        "round_seconds": seconds,
        "accuracy": [row["test_accuracy"] for row in records.rounds],
        "slow_classes_accuracy": accuracy_on(model, photos, np.concatenate(own[2:])) if own else None,
        "coverage": records.coverage(),
        "bytes_a_round": float(np.mean([row["bytes_down"] + row["bytes_up"] for row in records.rounds[1:]])),
    }


def _parts(
    args: argparse.Namespace, photos: ImageData, rule: Rule, name: str, seed: int
) -> tuple[list[np.ndarray], list[np.ndarray], list[float]]:
    """The photos of each board, the classes that are on it alone (of sign digits none), and how slow it is."""
    labels, own = photos.training_labels, list[np.ndarray]()
    if args.data_set == "grocery":
        parts, own = by_class(labels, seed)
    else:
        files = (Path(command_of(args, seed).training.data.data_dir or "") / "train").glob("*/*")
        persons = {digest(path.read_bytes()): person_of(path) for path in files}
        parts = by_person(np.array([persons[int(one)] for one in photos._train.digests]), seed)
    if name == "central":
        return [np.arange(len(labels))], own, [SLOWER[0]]
    slower = [max(SLOWER)] * len(SLOWER) if rule.is_alike else [*SLOWER]
    return parts[: rule.boards], own, slower[: rule.boards]


def accuracy_on(model: keras.Model, photos: ImageData, classes: np.ndarray) -> float:
    """The accuracy on the test photos of these classes, int array."""
    found = predict(model, photos)
    return float((found.predicted == found.labels)[np.isin(found.labels, classes)].mean())


def summed_up(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """What `runs` say of each rule: means over seeds, and times to shares of central training's accuracy.

    A share that a rule does not reach with each seed has no mean time: null. A round ends when it was planned to: the
    server's clock is no measure, since it looks for replies every quarter of a second.
    """
    central = {run["seed"]: run["accuracy"][-1] for run in runs if run["rule"] == "central"}
    found: dict[str, Any] = {}
    for name in (name for name in RULES if any(run["rule"] == name for run in runs)):
        own = [run for run in runs if run["rule"] == name]
        last = [100 * run["accuracy"][-1] for run in own]
        slow = [run["slow_classes_accuracy"] for run in own if run["slow_classes_accuracy"] is not None]
        round_seconds, coverage, sent = (
            float(np.mean([run[key] for run in own])) for key in ("round_seconds", "coverage", "bytes_a_round")
        )
        found[name] = {
            "accuracy_percent": float(np.mean(last)),
            "accuracy_deviation": float(np.std(last, ddof=1)) if len(last) > 1 else None,
            "slow_classes_percent": 100 * float(np.mean(slow)) if slow else None,
            "round_seconds": round_seconds,
            "seconds": float(np.mean([(len(run["accuracy"]) - 1) * run["round_seconds"] for run in own])),
            "coverage": coverage,
            "megabytes_a_round": 1e-6 * sent,
        }
        for share in SHARES:
            reached = [
                np.flatnonzero(np.array(run["accuracy"]) >= share * central.get(run["seed"], np.inf)) for run in own
            ]
            ends = [
                (int(at[0]), int(at[0]) * run["round_seconds"]) for at, run in zip(reached, own, strict=True) if len(at)
            ]
            number, seconds = np.mean(ends, axis=0).tolist() if len(ends) == len(own) else (None, None)
            found[name][f"to_{share:.0%}"] = {
                "seeds": f"{len(ends)} of {len(own)}",
                "round": number,
                "seconds": seconds,
            }
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The record: each run, and what all say of each rule."""
    os.environ |= {"TF_NUM_INTRAOP_THREADS": "1", "OMP_NUM_THREADS": "1"}  # runs side by side, and the table, too
    args.logdir = args.logdir.absolute()
    command, kept = command_of(args, 0), args.logdir / f"benchmark_fleet_{args.data_set}.json"
    photos = data.load(command.training.data, INPUT_SIZES[args.data_set], args.batch_size)
    training = command.training.with_classes(photos.num_classes)
    model = models.build(training.network)
    table = resolve(training, model, lambda *_: photos).table  # a short one, if there is none
    assert table is not None, "the scheme is elastic"
    settings = {name: getattr(args, name) for name in ("data_set", "alpha", "batch_size", "fleet_rounds", "weights")}
    settings["weights"] = settings["weights"].name
    rows = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else []
    runs = [row for row in rows if row["settings"] == settings and row["seed"] < args.seeds]
    present = {(run["rule"], run["seed"]) for run in runs}
    wanted = [(name, seed) for seed, name in product(range(args.seeds), RULES) if (name, seed) not in present]
    print(f"{len(present)} runs are in {kept}, {len(wanted)} are left", file=sys.stderr)
    with multiprocessing.get_context("spawn").Pool(args.jobs, maxtasksperchild=1) as pool:
        for run in pool.imap_unordered(partial(carry_out, args), wanted):
            runs.append({**run, "settings": settings})
            rows.append(runs[-1])
            write_json(kept, rows)
    of_table = {"full_step_ms": table.full_step_ms, "head_ms": table.predict_ms(head_mask(model))}
    found = [{name: value for name, value in run.items() if name != "settings"} for run in runs]
    rules = summed_up(found)
    accuracies = {"accuracy_percent": {name: one["accuracy_percent"] for name, one in rules.items()}}
    about = {**settings, "slower": SLOWER, "seeds": args.seeds, **of_table}
    return {**about, **accuracies, "rules": rules, "runs": found}


SETTINGS = {
    "data_set": Setting("sign_digits", "sign_digits", "which photos", {"choices": ("sign_digits", "grocery")}),
    "data_root": Setting(
        None, None, "holds the data sets, see scripts/study/study_data.py", {"type": folder, "required": True}
    ),
    "weights": Setting(None, None, "of the network without its head", {"type": existing_file, "required": True}),
    "logdir": Setting(
        Path("logs"), Path("logs"), "keeps the timing table, and each run that has ended; it is not repeated"
    ),
    "alpha": Setting(0.35, 0.35, "width of MobileNetV2"),
    "batch_size": Setting(16, 16, "photos of a step"),
    "fleet_rounds": Setting(8, 2, "of training, after the closed-form head"),
    "seeds": Setting(3, 1, "runs of each rule"),
    "jobs": Setting(2, 2, "runs side by side"),
}

if __name__ == "__main__":
    common.run_benchmark(__doc__, SETTINGS, measure, takes_network=False)
