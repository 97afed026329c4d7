#!/usr/bin/env python
"""Carry out a part of the study of docs/results.md, and write what its finished runs gave to docs/results/.

Each run is one call of main.py on one core, as many side by side as there are cores. Start it again after a stop:
interrupted runs continue, and those with a row in docs/results/ are not repeated. To repeat one, delete its row and its
folder.

    python scripts/study/run_study.py equal_time --data grocery --data_root DIR --weights_file FILE --seeds 3
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "figures"))

import plotting  # noqa: F401 (first: it sets the import path)
from plotting import ROOT
from results_page import REFERENCE, points_at, read_rows
from runner import Run, carry_out, make_run, make_table, network_and_table
from study_data import INPUT_SIZES, split_folder
from study_parts import PARTS, REFERENCE_BATCH, Basis, StudyRun

import utils
from elastic_trainer.runs.reader import is_finished, read_run
from elastic_trainer.settings.flags import OneLineParser, count, existing_file, folder, one_of
from elastic_trainer.system.errors import UserError
from elastic_trainer.system.files import write_csv
from elastic_trainer.system.machine import load_tensorflow

FROM_SUMMARY = (
    *("steps", "epochs", "final_accuracy", "best_accuracy", "train_seconds", "selection_seconds", "feature_seconds"),
    *("average_head_seconds", "validation_seconds", "elapsed_seconds", "rho_measured", "time_over_full"),
    *("start_memory_mb", "predicted_memory_mb", "peak_memory_mb"),
)


def shared_flags(args: argparse.Namespace, run: StudyRun) -> dict[str, Any]:
    """Flags of profiler.py and main.py: runs that agree in them share their images and their timing table.

    Raises `UserError` if the images or the weights are not there.
    """
    if args.data_root is None or args.weights_file is None:
        raise UserError(f"--data_root, --weights_file: are needed for the part {args.part}")
    network: dict[str, Any] = {"model_name": run.network, "alpha": 0.35, "weights": args.weights_file}
    if run.network != "mobilenetv2":
        network = {"model_name": run.network, "weights": "imagenet"}
    return {
        **network,
        "logdir": args.logdir / run.data,
        "input_size": INPUT_SIZES[run.data],
        "batch_size": run.batch_size,
        "dataset_name": "image_folder",
        "data_dir": split_folder(args.data_root, run.data, run.split, args.logdir / "data"),
    }


def make_runs(args: argparse.Namespace, wanted: Sequence[StudyRun], core: int) -> list[Run]:
    """The calls of main.py, in the order of `wanted`. Timing tables that are missing are made on `core`."""
    load_tensorflow()
    from elastic_trainer.datasets.named import find
    from elastic_trainer.networks.tensors import head_mask

    found: dict[str, Basis] = {}

    def basis_of(run: StudyRun) -> Basis:
        flags = shared_flags(args, run)
        if repr(flags) not in found:
            profiled = make_run(flags)
            make_table(profiled, core)
            model, table = network_and_table(profiled.settings)
            steps = find(profiled.settings).train.count // run.batch_size
            found[repr(flags)] = Basis(flags, table, head_mask(model), steps)
        return found[repr(flags)]

    def reference_seconds(run: StudyRun) -> float | None:
        if run.part in ("equal_time", "memory"):
            return basis_of(replace(run, batch_size=REFERENCE_BATCH)).full_seconds
        return wall_seconds(args) if run.part == "one_command" else None

    return [make_run({**run.flags(basis_of(run), reference_seconds(run)), "run_name": run.name}) for run in wanted]


def wall_seconds(args: argparse.Namespace) -> float:
    """What full training at batches of 4 took in all. Raises `UserError` if there are no rows of it."""
    path = args.results / f"equal_time_{args.data}.csv"
    points = points_at(path) if path.exists() else {}
    if REFERENCE not in points:
        raise UserError(f"{path}: has no row of full training at batches of 4; run the part equal_time first")
    return float(points[REFERENCE].elapsed_seconds.mean())


def results(args: argparse.Namespace) -> Path:
    """The file of a row a run."""
    return args.results / f"{args.part}_{args.data}.csv"


def written(args: argparse.Namespace, columns: Sequence[str]) -> dict[tuple[str, ...], dict[str, Any]]:
    """The rows that are there, of this or an earlier session, by `columns`."""
    path = results(args)
    return {tuple(row[name] for name in columns): row for row in read_rows(path)} if path.exists() else {}


def key_of(run: StudyRun) -> tuple[str, ...]:
    """The key of its row."""
    return tuple(map(str, run.settings.values()))


def write(args: argparse.Namespace, runs: Sequence[StudyRun]) -> None:
    """Write a row for each finished run. Other rows stay; those of runs that are not in `runs` come last."""
    rows = dict.fromkeys(map(key_of, runs)) | written(args, [*runs[0].settings])
    rows |= {key_of(run): _row(run, args.logdir) for run in runs if is_finished(run.folder(args.logdir))}
    found = [row for row in rows.values() if row]
    if found:
        columns = [*max(found, key=len)]  # earlier rows may lack some
        write_csv(results(args), columns, [[row.get(name) for name in columns] for row in found])


def _row(run: StudyRun, logdir: Path) -> dict[str, Any]:
    finished = read_run(run.folder(logdir))
    place = finished.config["environment"]
    curve = zip(finished.column("train_seconds"), finished.column("test_accuracy"), strict=True)
    return {
        **run.settings,
        **{name: finished.summary.get(name) for name in FROM_SUMMARY},
        "commit": place.get("commit"),
        "tensorflow": place["packages"]["tensorflow"],
        "processor": place.get("processor"),
        "curve": " ".join(f"{seconds:.1f}:{accuracy:.4f}" for seconds, accuracy in curve if accuracy == accuracy),
    }


def photos_parser(description: str | None) -> OneLineParser:
    """The flags that this script shares with compare_others.py."""
    parser = OneLineParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=one_of([*INPUT_SIZES]), default="grocery", metavar="NAME", help=", ".join(INPUT_SIZES))
    add("--data_root", type=folder, metavar="DIR", help="holds the data sets' folders")
    add("--weights_file", type=existing_file, metavar="FILE", help="MobileNetV2 0.35, no top")
    add("--seeds", type=count, default=1, metavar="N", help="default: %(default)s")
    add("--logdir", type=Path, default=Path("logs/study"), metavar="DIR", help="default: %(default)s")
    add("--results", type=Path, default=ROOT / "docs/results", metavar="DIR", help="default: docs/results")
    add("--only", default="*", metavar="PATTERN", help="runs whose name fits, as '*_b0.25_*'")
    return parser


def study_parser() -> OneLineParser:
    """The flags of this script."""
    parser = photos_parser(__doc__)
    parser.add_argument("part", type=one_of([*PARTS]), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--dry_run", action="store_true", help="print the commands; run none")
    return parser


def main() -> None:
    args = study_parser().parse_args()
    runs, cores = PARTS[args.part](args.data, args.seeds), sorted(os.sched_getaffinity(0))
    wanted = [run for run in runs if fnmatch(run.name, args.only)]
    if args.dry_run:
        for run in make_runs(args, wanted, cores[0]):
            print(run.folder.name, shlex.join(run.words))
        return
    rows = written(args, [*runs[0].settings])
    missing = [run for run in wanted if key_of(run) not in rows]
    print(f"{len(wanted) - len(missing)} of {len(wanted)} runs have a row")
    carry_out(make_runs(args, missing, cores[0]), cores, lambda: write(args, runs))
    write(args, runs)


if __name__ == "__main__":
    utils.run_cli(main)
