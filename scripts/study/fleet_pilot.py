#!/usr/bin/env python
r"""A fleet of three simulated boards, 1, 3 and 6 times slower: which cures does elastic training need there?

Every round has one deadline. In it the fast board trains everything, and the slowest its head and a little more. The
server averages each tensor over the boards that trained it. Boards train one after the other in this process; their
times are those of a timing table times their slowness. So results do not depend on this machine's speed. Rows of
docs/results/fleet.csv are not repeated; to repeat one, delete its row.

    python profiler.py --model_name mobilenetv2 --alpha 0.35 --input_size 96 --batch_size 16 --weights FILE \
        --dataset_name image_folder --data_dir DIR --logdir LOGS
    python scripts/study/fleet_pilot.py --data_root ../shared/data --weights_file FILE --table LOGS/profiles/NAME
"""

from __future__ import annotations

import math
import multiprocessing
import os
import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "figures"))

import numpy as np
import plotting  # noqa: F401 (first: it sets the import path)
from common import ROOT
from results_page import read_rows
from study_data import INPUT_SIZES, person_of

import utils
from elastic_trainer.cli.parser import OneLineParser
from elastic_trainer.errors import UserError
from elastic_trainer.files import write_csv
from elastic_trainer.fleet.average import Reply, aggregate
from elastic_trainer.machine import environment, load_tensorflow
from elastic_trainer.options import count, existing_file, folder
from elastic_trainer.settings import CLIPPING, PAPER, Settings, rate_at

if TYPE_CHECKING:
    from elastic_trainer.timing.table import TimingTable

SLOWNESS = (1, 3, 6)  # of the boards, over the device of the timing table
DEADLINE = 1.8  # of a round, in full passes of the fast board over its photos: 0.3 of the slowest board's
OWN_CLASSES = ((4, 5), (6, 7), (8, 9))  # of each board where classes are uneven; all boards have 0 to 3
RATE = rate_at(0.02, 16)  # of the robust recipe; falls to 0 by a cosine over the rounds
SLOW_CLASSES = (6, 7, 8, 9)  # those that the fast board lacks there
BATCH, ROUNDS, CLASSES, LOCAL = 16, 8, 10, 0.6  # LOCAL: weight of a board's own importance where it is blended
IMPORTANCE_ROUNDS, IMPORTANCE_BATCHES = 4, 2  # measured every so many rounds; each batch is a gradient pass
BLOCK = re.compile(r"block_\d+|expanded_conv|Conv_?1")  # of MobileNetV2, in names of tensors; else layers are blocks
IDENTITY = ("setting", "normalised", "split", "start", "seed")


class Setting(NamedTuple):
    """What the boards do in a round.

    Attributes:
        rule: what a board trains that cannot train everything: "importance", "windows", "upper", or "everything".
        is_blended: importance is 0.6 of the board's own and 0.4 of all boards'.
        has_deadline: else every board passes over its photos once, and the round lasts as long as the slowest takes.
        boards: how many take part, the fastest first.
    """

    rule: str = "everything"
    is_blended: bool = False
    has_deadline: bool = True
    boards: int = len(SLOWNESS)


SETTINGS = {
    "naive": Setting("importance"),
    "blended": Setting("importance", is_blended=True),
    "windows": Setting("windows", is_blended=True),
    "upper": Setting("upper"),
    "everything, fewer steps": Setting(),
    "FedAvg, waits": Setting(has_deadline=False),
    "central": Setting(boards=1),  # all photos on the fast board
    "fast board alone": Setting(boards=1),
}
NORMALISED = ("upper", "naive", "everything, fewer steps", "windows", "blended")  # too, on the uneven split
MAIN = 4  # the first of SETTINGS, whose comparison is the question
ON_EVEN = ("naive", "upper", "windows", "everything, fewer steps", "FedAvg, waits", "central")


def split_photos(labels: np.ndarray, persons: np.ndarray, split: str, seed: int) -> list[np.ndarray]:
    """The photos of each board, int arrays: by person, or where `split` is "uneven" with classes of its own.

    Args:
        labels, persons: int [photos].
    """
    order = np.random.default_rng(seed).permutation(np.unique(persons))
    owners = np.zeros(len(labels), int)
    for board, theirs in enumerate(np.array_split(order, len(SLOWNESS))):
        owners[np.isin(persons, theirs)] = board
    if split == "uneven":
        for board, classes in enumerate(OWN_CLASSES):
            owners[np.isin(labels, classes)] = board
    return [np.flatnonzero(owners == board) for board in range(len(SLOWNESS))]


def select_window(
    table: TimingTable, importance: np.ndarray, head: np.ndarray, rho: float, start: int
) -> tuple[np.ndarray, int]:
    """The tensors of a window of blocks, after FedEL (arXiv 2509.16902), and where the next window starts.

    A window has as many neighbouring blocks as the budget can train; importance selects among them. FedEL ends the
    network behind the window by an early exit. This network has none: the error goes all the way from the output to the
    window, which costs time beside the budget. The caller makes fewer steps for it.

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
    from elastic_trainer.selection.select import select_tensors

    mask = select_tensors(table, inside, head, min(rho + way_ms / table.full_step_ms, 0.999)).mask
    return mask, end if end < len(blocks) else first


@cache
def photos(root: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images float32 [photos, size, size, 3] in 0…255, labels and persons int [photos], of sign_digits."""
    import tensorflow as tf

    paths, size = sorted((root / "sign_digits").glob("[0-9]/*.JPG")), INPUT_SIZES["sign_digits"]
    if not paths:
        raise UserError(f"--data_root {root}: has no photos sign_digits/0…9/*.JPG")
    read = [tf.image.resize(tf.io.decode_jpeg(tf.io.read_file(str(path)), 3), (size, size)).numpy() for path in paths]
    labels, persons = ([kind(path) for path in paths] for kind in (lambda path: int(path.parent.name), person_of))
    return np.stack(read), np.array(labels, np.int32), np.array(persons)


class Fleet:
    """The server, and the boards, which share a network in this process: each loads the server's weights first.

    Args:
        args: flags of this script.
        row: the `IDENTITY` of the run.
    """

    def __init__(self, args: Any, row: dict[str, Any]) -> None:
        import keras

        import models
        from elastic_trainer import ArrayData, Trainer
        from elastic_trainer.networks.tensors import head_mask, tensor_names
        from elastic_trainer.selection.importance import ImportanceEvaluator
        from elastic_trainer.selection.schemes import Scheme
        from elastic_trainer.selection.select import Selection
        from elastic_trainer.task import ImageClassification
        from elastic_trainer.timing.graph_digest import graph_digest
        from elastic_trainer.timing.table import load_table
        from elastic_trainer.training.optimizers import SGDW

        class Given(Scheme):
            """Trains what the fleet says, from step `start` on."""

            start, mask = 0, np.zeros(0, bool)

            def is_due(self, step: int) -> bool:
                return step == self.start

            def next_selection(self, step: int, total_steps: int) -> int:
                return total_steps

            def select(self, progress: Any, state: Any) -> Selection:
                return Selection(self.mask)

        self.setting, self.normalised = SETTINGS[row["setting"]], row["normalised"] == "yes"
        self.rounds = args.rounds
        images, labels, persons = photos(args.data_root)
        keras.utils.set_random_seed(row["seed"])
        size, weights = INPUT_SIZES["sign_digits"], str(args.weights_file)
        self.model = models.build_model("mobilenetv2", size, CLASSES, weights, 0.35, row["seed"])
        task, variables = ImageClassification(self.model), self.model.trainable_variables
        self.head = head_mask(self.model)
        shapes, graph = [tuple(variable.shape) for variable in variables], graph_digest(task, BATCH)
        remake = "profiler.py, as this script's header says"
        self.table = load_table(args.table, {}, tensor_names(self.model), shapes, graph, remake, allow_stale=True)
        train, test = np.flatnonzero(persons % 5 > 1), np.flatnonzero(persons % 5 == 0)  # as in study_data
        self.test = images[test], labels[test]
        split = [train[part] for part in split_photos(labels[train], persons[train], row["split"], row["seed"])]
        whole = train if row["setting"] == "central" else np.concatenate(split[: self.setting.boards])
        if row["start"] == "closed form":  # by sums of features a fleet gets the same head
            data = ArrayData((images[whole], labels[whole]), (images[:1], labels[:1]), BATCH)
            Trainer(task, data, "closed_form_head", Settings()).run()
        self.names = [f"model/{[*map(id, self.model.variables)].index(id(one))}" for one in variables]
        self.weights = {name: one.numpy() for name, one in zip(self.names, variables, strict=True)}
        self.trainers, self.schemes, self.measure = [], [], ImportanceEvaluator(task, BATCH)
        of_boards = [whole] if row["setting"] == "central" else split[: self.setting.boards]
        self.pass_steps = len(split[0]) // BATCH
        for place, rows in enumerate(of_boards):
            data = ArrayData(
                (images[rows], labels[rows]), (images[:1], labels[:1]), BATCH, seed=10 * row["seed"] + place
            )
            head = np.flatnonzero(self.head).tolist()
            optimizer = SGDW(RATE, 0.9, PAPER["weight_decay"], CLIPPING, head)  # the robust recipe's
            settings = Settings(num_epochs=10_000, validation_share=0.0, feature_cache="off")
            self.schemes.append(Given())
            self.trainers.append(Trainer(task, data, self.schemes[-1], settings, optimizer=optimizer))
        self.importances: list[Any] = [None] * len(self.trainers)
        self.starts = [0] * len(self.trainers)
        self.trained = np.zeros((len(self.trainers), self.rounds, len(variables)), bool)

    def run(self) -> Iterator[tuple[float, float, float]]:
        """Train; after each round, and before the first, simulated seconds, accuracy, and that of `SLOW_CLASSES`."""
        seconds = 0.0
        yield seconds, *self._accuracies()
        for number in range(self.rounds):
            rate = RATE * 0.5 * (1 + math.cos(math.pi * number / self.rounds))
            blend = [one for one in self.importances if one is not None]
            replies, times = zip(
                *(self._round(place, number, rate, blend) for place in range(len(self.trainers))), strict=True
            )
            self.weights = aggregate(self.weights, replies, self.normalised)
            seconds += max(times) / 1e3  # the server waits for the slowest reply
            yield seconds, *self._accuracies()

    def coverage(self) -> tuple[float, float]:
        """Of the least trained tensor: the share of all boards' rounds, and of rounds on any of the slow boards."""
        by_slow = self.trained[1:].any(axis=0).mean(axis=0).min() if len(self.trained) > 1 else 0.0
        return float(self.trained.mean(axis=(0, 1)).min()), float(by_slow)

    def _round(self, place: int, number: int, rate: float, blend: Sequence[np.ndarray]) -> tuple[Reply, float]:
        """What board `place` replies, and its time in ms."""
        trainer, table, rule = self.trainers[place], self.table, self.setting.rule
        full_ms = table.predict_ms(np.ones(len(self.names), bool))
        self._send(place)
        left_ms = DEADLINE * self.pass_steps * full_ms / SLOWNESS[place]
        rho, spent_ms = left_ms / (self.pass_steps * full_ms), 0.0
        if rule in ("importance", "windows") and number % IMPORTANCE_ROUNDS == 0:
            batches = trainer.data.importance_batches(number, IMPORTANCE_BATCHES)
            self.importances[place] = self.measure(trainer.training.optimizer, batches)
            spent_ms = IMPORTANCE_BATCHES * table.gradient_pass_ms
        mask = self._selected(place, rho, blend) if rule != "everything" and rho < 1 else np.ones(len(self.names), bool)
        step_ms, steps = table.predict_ms(mask), self.pass_steps
        if self.setting.has_deadline:
            steps = max(int((left_ms - spent_ms) / step_ms), 1)
        self.schemes[place].start, self.schemes[place].mask = trainer.history.step, mask
        trainer.training.optimizer.learning_rate = rate
        trainer.run(trainer.history.step + steps)
        after, self.trained[place, number] = trainer.state().arrays, mask
        changes = {
            name: after[name] - self.weights[name] for name, is_in in zip(self.names, mask, strict=True) if is_in
        }
        return Reply(changes, trainer.data.train_count, steps), SLOWNESS[place] * (spent_ms + steps * step_ms)

    def _send(self, place: int) -> None:
        """Give board `place` the server's weights. Its momentum, which is of earlier weights, starts at 0."""
        from elastic_trainer.runs.checkpoint import State

        trainer, mask = self.trainers[place], self.schemes[place].mask
        if mask.size and mask.all():
            # `load` compiles the step again, since constants may be made from frozen weights. Here nothing is frozen.
            self._assign()
            for slot in trainer.training.optimizer.momentums:
                slot.assign(np.zeros(slot.shape))
            return
        slots = {
            name: np.zeros_like(value)
            for name, value in trainer.state().arrays.items()
            if name.startswith("optimizer/") and value.ndim
        }
        trainer.load(State({**self.weights, **slots}, {}))

    def _assign(self) -> None:
        for variable, name in zip(self.model.trainable_variables, self.names, strict=True):
            variable.assign(self.weights[name])

    def _selected(self, place: int, rho: float, blend: Sequence[np.ndarray]) -> np.ndarray:
        """What board `place` trains within `rho`: bool [N]; `blend` are the boards' importances of the round before."""
        from elastic_trainer.selection.select import select_tensors, select_upper_part

        importance = self.importances[place]
        if self.setting.is_blended and len(blend) == len(self.trainers):  # boards have about as many photos
            importance = LOCAL * importance + (1 - LOCAL) * np.mean(blend, axis=0)
        if self.setting.rule == "windows":
            mask, self.starts[place] = select_window(self.table, importance, self.head, rho, self.starts[place])
            return mask
        select = select_upper_part if self.setting.rule == "upper" else select_tensors
        return select(self.table, importance, self.head, rho).mask

    def _accuracies(self) -> tuple[float, float]:
        self._assign()
        images, labels = self.test
        correct = self.model.predict(images, batch_size=64, verbose=0).argmax(axis=1) == labels
        return float(correct.mean()), float(correct[np.isin(labels, SLOW_CLASSES)].mean())


def carry_out(args: Any, row: dict[str, Any]) -> dict[str, Any]:
    """The row of a run, all columns."""
    load_tensorflow()
    fleet = Fleet(args, row)
    curve = [*fleet.run()]
    coverage, by_slow = fleet.coverage()
    place = environment()
    return {
        **row,
        "rounds": fleet.rounds,
        "final_accuracy": curve[-1][1],
        "slow_classes_accuracy": curve[-1][2],
        "seconds": curve[-1][0],
        "coverage": coverage,
        "coverage_by_slow": by_slow,
        "slowest_trained": float(fleet.trained[-1].any(axis=0).mean()),
        "full_step_ms": fleet.table.full_step_ms,
        "commit": place["commit"],
        "tensorflow": place["packages"]["tensorflow"],
        "curve": " ".join(f"{seconds:.2f}:{one:.4f}:{slow:.4f}" for seconds, one, slow in curve),
    }


def wanted_runs(seeds: int) -> list[dict[str, Any]]:
    """The `IDENTITY` of each run, the most needed first: one seed of all, then more seeds of the main settings."""
    main, others = [*SETTINGS][:MAIN], [*SETTINGS][MAIN:]
    plain, by_step = [(name, "no") for name in main], [(name, "yes") for name in NORMALISED]
    rest = [(name, "no") for name in others]
    on_even = [("upper", "yes"), *((name, "no") for name in ON_EVEN), ("naive", "yes")]
    first, more = range(1), range(1, seeds)
    wanted = [
        *product(plain + rest + by_step, ["uneven"], ["closed form"], first),
        *product(plain + by_step[:3] + rest[:3], ["uneven"], ["closed form"], more),
        *product(on_even, ["even"], ["closed form"], first),
        *product(by_step[:2], ["uneven"], ["random head"], first),
        *product(by_step[3:] + rest[3:], ["uneven"], ["closed form"], more),
        *product(on_even, ["even"], ["closed form"], more),
    ]
    return [dict(zip(IDENTITY, (*pair, *where), strict=True)) for pair, *where in wanted]


def main() -> None:
    parser = OneLineParser(prog="fleet_pilot.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--data_root", type=folder, required=True, metavar="DIR", help="holds sign_digits/")
    parser.add_argument("--weights_file", type=existing_file, required=True, metavar="FILE", help="MobileNetV2 0.35")
    parser.add_argument("--table", type=folder, required=True, metavar="DIR", help="a folder of profiler.py")
    parser.add_argument("--seeds", type=count, default=3, metavar="N", help="default: %(default)s")
    parser.add_argument("--jobs", type=count, default=2, metavar="N", help="runs side by side (default: %(default)s)")
    parser.add_argument("--results", type=Path, default=ROOT / "docs/results/fleet.csv", metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="two rounds of four settings; records nothing")
    args = parser.parse_args()
    args.data_root, args.weights_file, args.rounds = args.data_root.absolute(), Path(args.weights_file), ROUNDS
    rows: list[dict[str, Any]] = []
    if args.quick:
        args.seeds, args.rounds = 1, 2
    elif args.results.exists():
        rows = list(read_rows(args.results))
    present = {tuple(str(row[name]) for name in IDENTITY) for row in rows}
    runs = [row for row in wanted_runs(args.seeds) if tuple(map(str, row.values())) not in present]
    runs = runs[:MAIN] if args.quick else runs
    print(f"{len(present)} runs have a row, {len(runs)} are left")
    os.environ |= {"TF_NUM_INTRAOP_THREADS": "1", "OMP_NUM_THREADS": "1"}
    context = multiprocessing.get_context("spawn")
    with context.Pool(args.jobs, maxtasksperchild=8) as pool:  # old graphs keep their memory
        for row in pool.imap_unordered(partial(carry_out, args), runs):
            rows.append(row)
            print(*rows[-1].values(), flush=True)
            if not args.quick:
                write_csv(args.results, [*rows[-1]], [[row[name] for name in rows[-1]] for row in rows])


if __name__ == "__main__":
    utils.run_cli(main)
