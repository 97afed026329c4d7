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
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import paper_figures
import plotting  # first: it sets the import path
from paper_figures import EGO, FIGURES
from runner import Run, carry_out, make_run

import utils
from elastic_trainer.cli.commands import NAMES as NAMES_OF_FLAGS
from elastic_trainer.datasets.named import class_names, find
from elastic_trainer.settings import MAIN_FLAGS, Settings
from elastic_trainer.settings.flags import OneLineParser, count, one_of, path_to_write

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


def steps_of_an_epoch(settings: Settings) -> int:
    """Number of steps; the paper's data sets need not be there."""
    return (paper_figures.IMAGES.get(settings.dataset_name) or find(settings).training_count) // settings.batch_size


def dry_run(runs: Sequence[Run]) -> None:
    """List the runs and their state."""
    for run in runs:
        state = "complete" if run.is_complete else "started" if run.folder.is_dir() else "to do"
        print(f"{state:8}  {run.settings.run_name}")


def draw(what: Sequence[str], runs: Sequence[Run], sheet: plotting.Sheet) -> None:
    """Draw a figure from its finished runs; `what`: `PaperFigure.plot`."""
    import plot
    import plot_selecting

    kind, *quantities = what
    if kind == "profiling":
        plot_selecting.profiling({run.table: steps_of_an_epoch(run.settings) for run in runs}, sheet)
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
    add("--dry_run", action="store_true", help="list the runs; run none")
    scale = "full: the paper's data and settings; quick: the same figure on the handwritten digits, in minutes"
    scale += " (default: %(default)s)"
    add("--scale", type=one_of(SCALES), default="full", metavar="SCALE", help=scale)
    add("--seeds", type=count, default=1, metavar="N", help="runs of each setting (default: %(default)s)")
    add("--reference", action="store_true", help="mark the paper's values if the setting is the paper's")
    instead = ("dataset_name", "data_dir", "model_name", "weights", "alpha", "input_size", "batch_size")
    flags = {name: replace(MAIN_FLAGS[name], section="instead of the paper's") for name in instead}
    parser.add(flags, NAMES_OF_FLAGS, default=None)
    add("--logdir", type=Path, metavar="DIR", help="default: logs/figures_<scale>")
    add("--output", type=path_to_write, metavar="STEM", help="default: figures/figure<name>_<scale>")
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
    if args.dry_run:
        dry_run(runs)
        return
    carry_out(runs)
    reference = paper_figures.REFERENCE.get(name, {}) if args.reference else {}
    if args.reference and not reference:
        print(f"--reference: no values of the paper are known for {args.name}")
    draw(figure.plot, runs, plotting.Sheet(args.output, args.scale, reference))


if __name__ == "__main__":
    utils.run_cli(main)
