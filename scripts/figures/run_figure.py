#!/usr/bin/env python
"""Remake a figure or table of the paper: train the runs that are missing, then draw it from their logs.

Complete runs are not repeated, interrupted ones continue, and figures share runs. scripts/run_figure<name>.sh call this
script. Words after -- are added to every call of main.py.

    python scripts/figures/run_figure.py 15 --dry_run
    python scripts/figures/run_figure.py 17ac --scale quick
    python scripts/figures/run_figure.py 15 --dataset_name image_folder --data_dir photos -- --test_fraction 0.2
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import paper_figures
import plotting  # first: it sets the import path
from paper_figures import EGO, FIGURES
from runner import Run, carry_out, make_run, network_and_table

import utils
from elastic_trainer.cli.commands import NAMES as NAMES_OF_FLAGS
from elastic_trainer.datasets.named import class_names, find
from elastic_trainer.selection.schedule import Schedule
from elastic_trainer.settings import MAIN_FLAGS, Settings
from elastic_trainer.settings.flags import OneLineParser, count, existing_file, one_of, stem_to_write
from elastic_trainer.system.errors import UserError
from elastic_trainer.system.machine import load_tensorflow

NAMES = (*FIGURES, *(f"{name}_ego" for name in EGO))
SCALES = ("full", "quick")


def make_runs(args: argparse.Namespace) -> list[Run]:
    """The runs of the figure that `args` (see `parse`) ask for, seed by seed."""
    names = ("data_dir", "weights", "alpha", "input_size", "batch_size", "logdir")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    is_quick = args.scale == "quick"
    profile = {
        "profile_seconds": paper_figures.QUICK_SECONDS if is_quick else None,
        "profile_only": FIGURES[args.name.removesuffix("_ego")].plot == ("profiling",),
    }
    wanted = paper_figures.runs_of(args.name, args.seeds, is_quick, args.dataset_name, args.model_name)
    return [make_run({**flags, **given}, args.more, classes=_classes, **profile) for flags in wanted]


def _classes(settings: Settings) -> int:
    """Number of classes; the paper's data sets need not be there."""
    return paper_figures.CLASSES.get(settings.dataset_name) or len(class_names(settings))


def image_counts(settings: Settings) -> tuple[int, int]:
    """Number of training and of test images; the paper's data sets need not be there."""
    if settings.dataset_name in paper_figures.IMAGES:
        return paper_figures.IMAGES[settings.dataset_name]
    return _counted(settings.dataset_name, settings.data_dir, settings.test_fraction)


@cache
def _counted(dataset_name: str, data_dir: Path | None, test_fraction: float | None) -> tuple[int, int]:
    return find(Settings(dataset_name=dataset_name, data_dir=data_dir, test_fraction=test_fraction)).counts


def estimated_hours(run: Run) -> float | None:
    """Hours of training and testing by the timing table; None without one.

    For PruneTrain this is an upper bound, since its network gets faster.
    """
    if not run.has_table or run.profile_only:
        return None
    from elastic_trainer.selection.named import trainable_mask

    settings, batch_size = run.settings, run.settings.batch_size
    model, table = network_and_table(settings)
    mask = trainable_mask(settings.train_type, model, settings.trained_layers)
    rho = settings.rho if run.is_elastic else min(table.predict_ms(mask) / table.full_step_ms, 1)
    train_images, test_images = image_counts(settings)
    schedule = Schedule.of(settings, train_images // batch_size)
    test_batches = schedule.epochs * math.ceil(test_images / batch_size)
    return (schedule.total_steps * rho * table.full_step_ms + test_batches * table.forward_ms) / 3.6e6


def dry_run(runs: Sequence[Run], hours: tuple[float | None, float | None]) -> None:
    """List the runs, their state, and how long they would take here; `hours`: see `PaperFigure`."""
    load_tensorflow()
    total, unknown = 0.0, 0
    for run in runs:
        state = "complete" if run.is_complete else "started" if run.folder.is_dir() else "to do"
        estimate = estimated_hours(run)
        if state != "complete":
            total, unknown = total + (estimate or 0), unknown + (estimate is None)
        text = "?" if estimate is None else f"{estimate:.2f}" if estimate >= 0.01 else f"{estimate:.4f}"
        print(f"{state:8}  {text:>8} h  {run.settings.run_name}")
    more = f" and {unknown} runs without a table" if unknown else ""
    print(f"to do here, training and testing by the timing tables, started runs in full: {total:.3g} h{more}")
    known = zip(hours, ("Jetson TX2", "Raspberry Pi 4B"), strict=True)
    devices = [f"{value:g} h on a {name}" for value, name in known if value]
    if devices:
        print(f"by the paper, or estimated from it: {', '.join(devices)}")


def draw(what: Sequence[str], runs: Sequence[Run], sheet: plotting.Sheet) -> None:
    """Draw a figure from its finished runs; `what`: `PaperFigure.plot`."""
    import plot
    import plot_selecting

    kind, *quantities = what
    if kind == "profiling":
        steps = {run.table: image_counts(run.settings)[0] // run.settings.batch_size for run in runs}
        plot_selecting.profiling(steps, sheet)
        return
    subproblems = sheet._replace(stem=sheet.stem.with_name(f"{sheet.stem.name}_subproblems"))
    if kind == "solver" and not subproblems.stem.with_name(f"{subproblems.stem.name}.csv").is_file():
        plot_selecting.subproblems(subproblems)
    plot.KINDS[kind](plotting.group_runs([run.folder for run in runs]), sheet, *quantities)


def figure_parser() -> OneLineParser:
    """The flags of this script."""
    as_written = argparse.RawDescriptionHelpFormatter
    parser = OneLineParser(prog="run_figure.py", description=__doc__, formatter_class=as_written)
    parser.add_argument("name", type=one_of(NAMES), metavar="FIGURE", help=", ".join(NAMES))
    add = parser.add_argument
    add("--dry_run", action="store_true", help="list the runs and the hours they would take; run none")
    scale = "full: the paper's data and settings; quick: the same figure on the handwritten digits, in minutes"
    scale += " (default: %(default)s)"
    add("--scale", type=one_of(SCALES), default="full", metavar="SCALE", help=scale)
    add("--seeds", type=count, default=1, metavar="N", help="runs of each setting (default: %(default)s)")
    add("--reference", action="store_true", help="mark the paper's values if the setting is the paper's")
    recorded = "of figure 16: a table of the authors' own runs on a Raspberry Pi 4B, whose curves are drawn, too"
    add("--recorded", type=existing_file, metavar="FILE.csv", help=recorded)
    instead = ("dataset_name", "data_dir", "model_name", "weights", "alpha", "input_size", "batch_size")
    flags = {name: replace(MAIN_FLAGS[name], section="instead of the paper's") for name in instead}
    parser.add(flags, NAMES_OF_FLAGS, default=None)
    add("--logdir", type=Path, metavar="DIR", help="default: logs/figures_<scale>")
    add("--output", type=stem_to_write, metavar="STEM", help="default: figures/figure<name>_<scale>")
    return parser


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; `more` holds the words after --. Raises `UserError` for a value out of range."""
    given = [*(sys.argv[1:] if arguments is None else arguments)]
    split = given.index("--") if "--" in given else len(given)
    args = figure_parser().parse_args(given[:split])
    args.more = given[split + 1 :]
    args.logdir = args.logdir or Path("logs") / f"figures_{args.scale}"
    args.output = args.output or Path("figures") / f"figure{args.name}_{args.scale}"
    return args


def main() -> None:
    args = parse()
    name = args.name.removesuffix("_ego")
    figure, runs = FIGURES[name], make_runs(args)
    recorded = paper_figures.recorded_curves(args.recorded) if args.recorded else {}
    if recorded and name != "16":
        raise UserError(f"--recorded: is of figure 16 alone, not of {args.name}")
    if args.dry_run:
        dry_run(runs, figure.hours)
        return
    carry_out(runs)
    reference = paper_figures.REFERENCE.get(name, {}) if args.reference else {}
    if args.reference and not reference:
        print(f"--reference: no values of the paper are known for {args.name}")
    draw(figure.plot, runs, plotting.Sheet(args.output, args.scale, reference, recorded))


if __name__ == "__main__":
    utils.run_cli(main)
