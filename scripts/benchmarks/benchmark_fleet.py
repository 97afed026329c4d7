#!/usr/bin/env python
r"""One model from boards of which some are slower: by which rule is a fleet accurate first?

The boards train for the program's own server, one after the other in this process. A step takes what a timing table of
this machine says, times how much slower a board is; messages take no time. So times do not depend on how busy the
machine is. Sign digits are divided by person, over boards that are 1, 1, 3 and 6 times slower. Of the classes of
grocery, 0.4 are on all four boards, and each other one is on one board alone. The handwritten digits are those of
`scripts/run_fleet.sh`: on boards that are 1, 5 and 15 times slower; all rules have equal time there.

central     all photos on one board as fast as the fastest, a pass in each round: the accuracy to reach
alone_1…3   one board of the digits
waits       FedAvg: each board passes over its photos once, and the round lasts as long as the slowest takes
drops       FedAvg without the slow boards; their photos are lost
same_rho    all boards train what the slowest can
ours        what `fleet.py` does
ours_short  the same with a shorter round: one pass of the fastest board over its photos instead of 1.3

Accuracy is that of the best model so far. docs/log/fleet.md has FedEL's rule and windows, too; commits aeb1061 and
9d68b0c have their code.

    python scripts/benchmarks/benchmark_fleet.py --data_set grocery --data_root ../shared/data --weights FILE \
        --logdir logs
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
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
sys.path.insert(0, str(common.ROOT / "scripts" / "tools"))

from digits_on_boards import own_digits, owners, write_all
from study_data import INPUT_SIZES, person_of, split_folder

import data
import models
from elastic_trainer.cli.commands import TrainCommand
from elastic_trainer.cli.resolve import resolve
from elastic_trainer.datasets.digests import digest
from elastic_trainer.datasets.image_data import ImageData
from elastic_trainer.errors import UserError
from elastic_trainer.evaluation.predictions import predict
from elastic_trainer.extensions.fleet.average import OwnAverage
from elastic_trainer.extensions.fleet.board import EPOCHS
from elastic_trainer.extensions.fleet.command_line import ServeCommand, parse_fleet, sent_words
from elastic_trainer.extensions.fleet.messages import About
from elastic_trainer.extensions.fleet.pace import usual_round_seconds
from elastic_trainer.extensions.fleet.records import Records
from elastic_trainer.extensions.fleet.roster import Roster
from elastic_trainer.extensions.fleet.rounds import BoardSetup
from elastic_trainer.extensions.fleet.server import FleetServer
from elastic_trainer.extensions.fleet.settings import PASSES
from elastic_trainer.extensions.fleet.simulated import SimulatedBoard, simulation
from elastic_trainer.networks.names import GLYPH_WEIGHTS
from elastic_trainer.networks.tensors import head_mask, tensor_names
from elastic_trainer.options import existing_file, folder
from elastic_trainer.timing.table import TimingTable
from elastic_trainer.training.state import TrainState

DIGITS = "digits"
SLOWER = {DIGITS: (1.0, 5.0, 15.0), "sign_digits": (1.0, 1.0, 3.0, 6.0), "grocery": (1.0, 1.0, 3.0, 6.0)}
SLOW = 2  # place of the first board whose loss `drops` takes; `SLOWER` rises
COMMON = 0.4  # share of the classes that all boards have
DIGIT_PASSES = 6  # as `--round_passes` of run_fleet.sh
SHARE = 0.95  # of central training's accuracy, the time to which counts


class OnePassBoard(SimulatedBoard):
    """Passes over its photos once in each round."""

    def train_steps(self, rate: float, max_steps: int = EPOCHS) -> int:
        return super().train_steps(rate, min(max_steps, self.trainer.data.steps_per_epoch))


class Rule(NamedTuple):
    """What the boards do in a round.

    Attributes:
        board: of which kind they are.
        normalised: whether changes are averaged by local step; if not, as they are.
        boards: those that take part.
        is_alike: all are as slow as the slowest.
        passes: the length of a round, in passes of the fastest board over its photos; None: each board has the time
            for all tensors.
    """

    board: type[SimulatedBoard] = SimulatedBoard
    normalised: bool = True
    boards: slice = slice(None)
    is_alike: bool = False
    passes: float | None = PASSES


RULES = {
    "central": Rule(OnePassBoard, boards=slice(1), passes=None),
    **{f"alone_{place + 1}": Rule(boards=slice(place, place + 1)) for place in range(3)},
    "waits": Rule(OnePassBoard, False, passes=None),
    "ours": Rule(),
    "drops": Rule(normalised=False, boards=slice(SLOW)),
    "same_rho": Rule(is_alike=True),
    "ours_short": Rule(passes=1.0),
}
OF_DIGITS = ("alone_1", "alone_2", "alone_3", "waits", "drops", "ours")


def rules_of(data_set: str, wanted: str) -> list[str]:
    """The rules that are compared on a data set, or those `wanted`, A,B,…"""
    if wanted:
        return wanted.split(",")
    return [name for name in RULES if (name in OF_DIGITS if data_set == DIGITS else "alone" not in name)]


def by_person(persons: np.ndarray, seed: int, boards: int) -> list[np.ndarray]:
    """The photos of each board, int arrays: those of an equal part of the `persons`, int [photos]."""
    order = np.random.default_rng(seed).permutation(np.unique(persons))
    return [np.flatnonzero(np.isin(persons, part)) for part in np.array_split(order, boards)]


def by_class(labels: np.ndarray, seed: int, boards: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The photos of each board, by labels int [photos], and the classes that are on it alone; int arrays."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(np.unique(labels))
    own = np.array_split(order[round(COMMON * len(order)) :], boards)
    owners = rng.permutation(np.arange(len(labels)) % boards)
    for board, classes in enumerate(own):
        owners[np.isin(labels, classes)] = board
    return [np.flatnonzero(owners == board) for board in range(boards)], own


def command_of(args: argparse.Namespace, seed: int) -> ServeCommand:
    """A fleet as `fleet.py simulate` trains it."""
    words = ["simulate", "--rounds", args.fleet_rounds, "--seed", seed, "--logdir", args.logdir]
    if args.data_set == DIGITS:
        photos, weights, size = args.logdir / DIGITS, GLYPH_WEIGHTS, 64
        words += ["--augment", "none"]
    else:
        photos = split_folder(args.data_root, args.data_set, "test", args.logdir / "data_sets")
        weights, size = args.weights, args.input_size or INPUT_SIZES[args.data_set]
    words += ["--dataset_name", "image_folder", "--data_dir", photos, "--weights", weights]
    words += ["--model_name", "mobilenetv2", "--alpha", args.alpha, "--input_size", size]
    words += ["--batch_size", args.batch_size]
    command = parse_fleet([str(word) for word in words])
    assert isinstance(command, ServeCommand)
    return command


Kept = tuple[TrainCommand, ImageData, BoardSetup, list[TrainState], list[np.ndarray]]
_kept: dict[int, Kept] = {}  # of the latest seed: what the rules share in a process


def carry_out(args: argparse.Namespace, table: TimingTable, run: tuple[str, int]) -> dict[str, Any]:
    """A fleet by the rule of this name and with this seed: what came of it, round by round."""
    name, seed = run
    rule, command, slower = RULES[name], command_of(args, seed), SLOWER[args.data_set]
    if seed not in _kept:
        _kept.clear()
        photos, training = _prepared(args, command)
        setup = BoardSetup(models.build(training.network), photos, table, training.training)
        weights = [variable.numpy() for variable in setup.model.variables]
        _kept[seed] = training, photos, setup, list[TrainState](), weights
    training, photos, setup, steps, weights = _kept[seed]
    for variable, value in zip(setup.model.variables, weights, strict=True):  # dropout's state, too
        variable.assign(value)
    model = models.build(training.network)
    parts, own = _parts(args, command, photos, seed)
    passes = [len(rows) // photos.batch_size * table.full_step_ms / 1e3 for rows in parts]
    share = table.predict_ms(head_mask(model)) / table.full_step_ms
    abouts = [
        About("", len(rows), 0, times * one, share * times * one)
        for rows, times, one in zip(parts, slower, passes, strict=True)
    ]
    is_digits = args.data_set == DIGITS
    rounds, usual = args.fleet_rounds, usual_round_seconds(abouts, DIGIT_PASSES if is_digits else rule.passes or PASSES)
    seconds = usual
    if name == "central":
        seconds = 1.001 * (photos.train_count // photos.batch_size) * table.full_step_ms / 1e3
    elif rule.passes is None:
        seconds = 1.001 * max(times * one for times, one in zip(slower, passes, strict=True))
        rounds = max(round(rounds * usual / seconds), 1) if is_digits else rounds
    elif not is_digits:
        seconds = usual_round_seconds(abouts[rule.boards], rule.passes)
    parts = [np.arange(photos.train_count)] if name == "central" else parts[rule.boards]
    slower = (slower[-1],) * len(slower) if rule.is_alike else slower[rule.boards]
    fleet = replace(command.fleet, boards=len(parts), round_seconds=seconds, rounds=rounds)
    link = simulation(setup, parts, slower, lambda line: None, rule.board, 0.0, steps)
    hello = {"words": sent_words(command.training, photos.num_classes), "class_names": [*photos.class_names]}
    with tempfile.TemporaryDirectory() as place:
        records = Records(Path(place), command.config, tensor_names(model))
        roster = Roster(link, lambda line: print(f"{name} {seed}: {line}", file=sys.stderr, flush=True))
        rate, average = training.training.learning_rate, OwnAverage(rule.normalised)
        server = FleetServer(roster, model, fleet, rate, hello, records, photos, average)
        server.run()
        records.finish(server.seconds)
    found, slow = predict(model, photos), np.concatenate(own[SLOW:]) if own else np.array([])
    of_slow = (found.predicted == found.labels)[np.isin(found.labels, slow)]
    return {
        "rule": name,
        "seed": seed,
        "round_seconds": seconds,
        "accuracy": np.maximum.accumulate([row["test_accuracy"] for row in records.rounds]).tolist(),
        "slow_classes_percent": 100 * float(of_slow.mean()) if own else None,
        "coverage": records.coverage(),
        "megabytes_a_round": float(np.mean([row["bytes_down"] + row["bytes_up"] for row in records.rounds[1:]])) / 1e6,
    }


def _prepared(args: argparse.Namespace, command: ServeCommand) -> tuple[ImageData, TrainCommand]:
    """The photos, and how a board trains."""
    network = command.training.network
    photos = data.load(command.training.data, network.input_size, network.batch_size, network.seed)
    return photos, command.training.with_classes(photos.num_classes).choose(batch_size=photos.batch_size)


def _parts(
    args: argparse.Namespace, command: ServeCommand, photos: ImageData, seed: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The photos of each board, and the classes that are on it alone, of sign digits none."""
    labels, boards = photos.training_labels, len(SLOWER[args.data_set])
    if args.data_set == DIGITS:
        places = owners(labels, boards)
        return [np.flatnonzero(places == board) for board in range(boards)], [*own_digits(boards)]
    if args.data_set == "grocery":
        return by_class(labels, seed, boards)
    place = Path(command.training.data.data_dir or "")
    persons = {digest(path.read_bytes()): person_of(path) for path in (place / "train").glob("*/*")}
    return by_person(np.array([persons[int(one)] for one in photos._train.digests]), seed, boards), []


def summed_up(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """What `runs` say of each rule: means over seeds, and times to `SHARE` of central training's accuracy.

    If a rule does not reach it with each seed, it has no mean time: null. A round ends when it was planned to: the
    server's clock is no measure, since it looks for replies every quarter of a second.
    """
    central = {run["seed"]: run["accuracy"][-1] for run in runs if run["rule"] == "central"}
    found: dict[str, Any] = {}
    for name in (name for name in RULES if any(run["rule"] == name for run in runs)):
        own = [run for run in runs if run["rule"] == name]
        last = [100 * run["accuracy"][-1] for run in own]
        means = {
            key: float(np.mean([run[key] for run in own]))
            for key in ("round_seconds", "coverage", "megabytes_a_round", "slow_classes_percent")
            if own[0][key] is not None
        }
        deviation = float(np.std(last, ddof=1)) if len(last) > 1 else None
        found[name] = {"accuracy_percent": float(np.mean(last)), "accuracy_deviation": deviation, **means}
        reached = [np.flatnonzero(np.array(run["accuracy"]) >= SHARE * central.get(run["seed"], np.inf)) for run in own]
        rounds = [int(each[0]) for each in reached if len(each)]
        is_known = len(rounds) == len(own)
        found[name]["to_95%"] = {
            "seeds": f"{len(rounds)} of {len(own)}",
            "round": float(np.mean(rounds)) if is_known else None,
            "seconds": float(np.mean(rounds)) * means["round_seconds"] if is_known else None,
        }
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The record: each run, and what all say of each rule."""
    os.environ |= {"TF_NUM_INTRAOP_THREADS": "1", "OMP_NUM_THREADS": "1"}  # runs side by side, and the table, too
    args.logdir = args.logdir.absolute()
    if args.data_set != DIGITS and None in (args.data_root, args.weights):
        raise UserError(f"--data_set {args.data_set}: needs --data_root and --weights")
    if args.data_set == DIGITS:
        write_all(args.logdir / DIGITS)
    photos, training = _prepared(args, command_of(args, 0))
    model = models.build(training.network)
    table = resolve(training, model, lambda *_: photos).table
    assert table is not None, "the scheme is elastic"
    wanted = [(name, seed) for seed, name in product(range(args.seeds), rules_of(args.data_set, args.rules))]
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        runs = [*pool.imap_unordered(partial(carry_out, args, table), wanted)]
    rules = summed_up(runs)
    return {
        **{name: getattr(args, name) for name in ("data_set", "fleet_rounds", "seeds")},
        **{"alpha": training.network.alpha, "batch_size": photos.batch_size, "input_size": training.network.input_size},
        "weights": Path(training.network.weights).name,
        "slower": SLOWER[args.data_set],
        "full_step_ms": table.full_step_ms,
        "head_ms": table.predict_ms(head_mask(model)),
        "accuracy_percent": {name: one["accuracy_percent"] for name, one in rules.items()},
        "rules": rules,
        "runs": runs,
    }


SETTINGS = {
    "data_set": Setting("sign_digits", "sign_digits", "which photos", {"choices": (*SLOWER,)}),
    "data_root": Setting(None, None, "holds the data sets, see scripts/study/study_data.py", {"type": folder}),
    "weights": Setting(None, None, "of the network without its head", {"type": existing_file}),
    "logdir": Setting(Path("logs"), Path("logs"), "keeps the timing table"),
    "alpha": Setting(0.35, 0.35, "width of MobileNetV2"),
    "batch_size": Setting(16, 16, "photos of a step"),
    "fleet_rounds": Setting(8, 2, "of training, after the closed-form head"),
    "seeds": Setting(3, 1, "runs of each rule"),
    "rules": Setting("", "", "of these rules alone, A,B,…"),
    "input_size": Setting(0, 0, "pixels; 0: the data set's"),
    "jobs": Setting(2, 2, "runs side by side"),
}

if __name__ == "__main__":
    common.run_benchmark(__doc__, SETTINGS, measure, takes_network=False)
