#!/usr/bin/env python
"""Carry out a part of the study of docs/results.md, and write what its finished runs gave to docs/results/.

Each run is one call of main.py on one core, as many side by side as there are cores, so that no run disturbs another
more than any other does. Start it again after a stop: interrupted runs continue, and those with a row in docs/results/
are not repeated. To repeat one, delete its row and its folder.

    python scripts/study/run_study.py rates --data grocery --data_root ../shared/data --weights_file FILE --seeds 2
"""

from __future__ import annotations

import argparse
import os
import queue
import shlex
import subprocess
import sys
import threading
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "figures"))

import plotting  # first: it sets the import path
from common import ROOT
from results_page import read_rows
from study_data import INPUT_SIZES, split_folder
from study_runs import PARTS, VARIANTS, StudyRun
from study_variants import register_variants
from tqdm import tqdm

import utils
from elastic_trainer.cli.parser import OneLineParser, as_words
from elastic_trainer.cli.train_command import parse_training
from elastic_trainer.errors import UserError
from elastic_trainer.files import write_csv
from elastic_trainer.options import OneOf, count, existing_file, folder
from elastic_trainer.registry import SCHEMES
from elastic_trainer.runs.reader import is_finished, read_run

THREADS = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
IDENTITY = ("setting", "data", "split", "budget", "learning_rate", "seed")  # columns that no two rows share
NETWORKS: dict[str, dict[str, Any]] = {
    "mobilenetv2": {"model_name": "mobilenetv2", "alpha": 0.35},
    "resnet": {"model_name": f"{ROOT}/scripts/study/study_networks.py:resnet"},
}
FROM_SUMMARY = (
    "steps",
    "epochs",
    "final_accuracy",
    "best_accuracy",
    "train_seconds",
    "selection_seconds",
    "feature_seconds",
    "validation_seconds",
    "elapsed_seconds",
    "rho_measured",
    "time_over_full",
    "peak_memory_mb",
)


class Study:
    """What all runs of a part share.

    Args:
        args: the command line, see `study_parser`.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        path = self._results
        self._written = {_identity(row): row for row in read_rows(path)} if path.exists() else {}

    @property
    def _results(self) -> Path:
        return self._args.results / f"{self._args.part}_{self._args.data}.csv"

    def shared_flags(self, split: str, clipping: float, batch_size: int, network: str) -> list[str]:
        """Flags of profiler.py and main.py. Raises `UserError` if the network has no weights yet."""
        args = self._args
        weights = args.weights_file if network == "mobilenetv2" else args.logdir / f"{network}_glyphs.keras"
        if not weights.exists():
            raise UserError(f"{weights}: is missing; make it with scripts/study/pretrain_{network}.py {weights}")
        images = split_folder(args.data_root, args.data, split, args.logdir / "data")
        flags = {
            **NETWORKS[network],
            "input_size": INPUT_SIZES[args.data],
            "batch_size": batch_size,
            "dataset_name": "image_folder",
            "data_dir": images,
            "weights": weights,
            "recipe": "paper",  # what it sets is given for each run
            "gradient_clipping": clipping,
            "logdir": args.logdir / args.data,
        }
        return as_words(flags)

    def commands(self, runs: Sequence[StudyRun]) -> dict[str, list[str]]:
        """The script and its flags for each run, by its name. Timing tables are made if they are missing."""
        from elastic_trainer.datasets.sources import count_classes
        from elastic_trainer.selection.schemes import trainable_mask
        from elastic_trainer.timing.table import table_folder

        found = {}
        for kind in sorted({_kind(run) for run in runs}):
            shared = self.shared_flags(*kind)
            command = parse_training(shared)
            images = command.data.data_dir
            assert images is not None, "the shared flags name it"
            command = command.with_classes(count_classes("image_folder", images))
            has_table = (table_folder(command.network, command.run.logdir) / "profile.json").is_file()
            if not has_table and self.call(["profiler.py", *shared], "profile", 0):
                raise UserError(f"profiler.py failed; see {self._args.logdir}/profile.log")
            model, table = plotting.network_and_table(command)
            masks = {name: trainable_mask(name, model, 1) for name in SCHEMES if SCHEMES[name].mask}
            photos = [sum(1 for _ in images.glob(f"{part}/*/*")) for part in ("train", "test")]
            batches = photos[0] // kind[2], -(-photos[1] // kind[2])
            for run in runs:
                if _kind(run) == kind:
                    flags = {**run.flags(table, masks, *batches), "run_name": run.name}
                    if run.after:
                        flags["weights"] = self._args.logdir / run.data / run.after
                    script = "scripts/study/train_variant.py" if run.train_type in VARIANTS.values() else "main.py"
                    found[run.name] = [script, *shared, *as_words(flags), "--resume"]
        return found

    def wanted(self, runs: Sequence[StudyRun]) -> list[StudyRun]:
        """Those that `--only` asks for."""
        return [run for run in runs if fnmatch(run.name, self._args.only)]

    def is_done(self, run: StudyRun) -> bool:
        """Whether it is finished, here or in an earlier session whose folders are gone."""
        return is_finished(run.folder(self._args.logdir)) or _identity(_settings_of(run)) in self._written

    def call(self, words: Sequence[str], log: str, core: int) -> int:
        """Run one of our scripts, with its flags, on one core; its output goes to a file. Returns its exit status."""
        path = self._args.logdir / f"{log}.log"
        with path.open("a") as file:
            command = ["taskset", "-c", str(core), sys.executable, str(ROOT / words[0]), *words[1:]]
            return subprocess.run(
                command, check=False, stdout=file, stderr=file, env={**os.environ, **THREADS}
            ).returncode

    def carry_out(self, runs: Sequence[StudyRun]) -> None:
        """Train what is missing, one run on each core. Raises `UserError` if some failed; the others are finished."""
        wanted = self.wanted(runs)
        missing = [run for run in wanted if not self.is_done(run)]
        commands, failed = self.commands(missing), []
        waiting: queue.SimpleQueue[StudyRun] = queue.SimpleQueue()
        for run in missing:
            waiting.put(run)

        def work(core: int, bar: tqdm) -> None:
            while True:
                try:
                    run = waiting.get_nowait()
                except queue.Empty:
                    return
                if self.call(commands[run.name], run.name, core):
                    failed.append(run.name)
                self.write(runs)
                bar.update()

        with tqdm(total=len(wanted), initial=len(wanted) - len(missing), unit="run") as bar:
            cores = sorted(os.sched_getaffinity(0))
            threads = [threading.Thread(target=work, args=(core, bar)) for core in cores]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if failed:
            raise UserError(f"{len(failed)} runs failed, see {self._args.logdir}/{failed[0]}.log")

    def write(self, runs: Sequence[StudyRun]) -> None:
        """Write a row for each finished run. Rows of runs that are not in `runs` stay, at the end."""
        finished = [self._row(run) for run in runs if is_finished(run.folder(self._args.logdir))]
        rows = {_identity(_settings_of(run)): None for run in runs} | self._written
        rows |= {_identity(row): row for row in finished}
        found = [row for row in rows.values() if row]
        if found:
            write_csv(self._results, [*found[0]], [[*row.values()] for row in found])

    def _row(self, run: StudyRun) -> dict[str, Any]:
        finished = read_run(run.folder(self._args.logdir))
        summary, place = finished.summary, finished.config["environment"]
        curve = zip(finished.column("train_seconds"), finished.column("test_accuracy"), strict=True)
        return {
            **_settings_of(run),
            **{name: summary.get(name) for name in FROM_SUMMARY},
            "commit": place.get("commit"),
            "tensorflow": place["packages"]["tensorflow"],
            "processor": place.get("processor"),
            "curve": " ".join(f"{seconds:.1f}:{accuracy:.4f}" for seconds, accuracy in curve),
        }


def _kind(run: StudyRun) -> tuple[str, float, int, str]:
    """Split, clipping, batch size and network: runs that agree in them share their images and their timing table."""
    return run.split, run.more.get("gradient_clipping", 0.0), run.batch_size, run.network


def _settings_of(run: StudyRun) -> dict[str, Any]:
    """The columns of `IDENTITY`."""
    values = (run.label, run.data, run.split, run.budget, run.rate, run.seed)
    return dict(zip(IDENTITY, values, strict=True))


def _identity(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in IDENTITY)


def study_parser() -> OneLineParser:
    """The flags of this script."""
    parser = OneLineParser(
        prog="run_study.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_shared_flags(parser)
    parser.add_argument("part", type=OneOf([*PARTS]), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--data_root", type=folder, required=True, metavar="DIR", help="holds the data sets' folders")
    parser.add_argument(
        "--weights_file", type=existing_file, required=True, metavar="FILE", help="MobileNetV2 0.35, no top"
    )
    parser.add_argument("--only", default="*", metavar="PATTERN", help="runs whose name fits, as '*_b0.25_*'")
    parser.add_argument("--dry_run", action="store_true", help="print the commands; run none")
    return parser


def add_shared_flags(parser: OneLineParser) -> None:
    """Those of each script that reads the folders of runs."""
    parser.add_argument(
        "--data", type=OneOf([*INPUT_SIZES]), default="grocery", metavar="NAME", help=", ".join(INPUT_SIZES)
    )
    parser.add_argument("--seeds", type=count, default=1, metavar="N", help="default: %(default)s")
    parser.add_argument("--logdir", type=Path, default=Path("logs/study"), metavar="DIR", help="default: %(default)s")
    parser.add_argument(
        "--results", type=Path, default=ROOT / "docs/results", metavar="DIR", help="default: docs/results"
    )


def main() -> None:
    register_variants()
    args = study_parser().parse_args()
    args.logdir.mkdir(parents=True, exist_ok=True)
    args.results.mkdir(parents=True, exist_ok=True)
    runs = PARTS[args.part](args.data, args.seeds)
    study = Study(args)
    if args.dry_run:
        for name, command in study.commands(study.wanted(runs)).items():
            print(name, shlex.join(command))
        return
    study.carry_out(runs)
    study.write(runs)


if __name__ == "__main__":
    utils.run_cli(main)
