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
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import paper_figures
import plotting
from common import ROOT
from paper_figures import EGO, FIGURES, Run

import utils
from elastic_trainer.cli.commands import TrainCommand, profiler_flags
from elastic_trainer.cli.flags import add_flag
from elastic_trainer.cli.parser import OneLineParser, as_words
from elastic_trainer.cli.train_command import parse_training
from elastic_trainer.errors import Stopped, UserError
from elastic_trainer.machine import load_tensorflow
from elastic_trainer.options import OneOf, count, stem_to_write
from elastic_trainer.runs.config import first_change, without_effect
from elastic_trainer.runs.reader import is_finished, read_run
from elastic_trainer.selection.schedule import Schedule
from elastic_trainer.settings import MAIN_FLAGS, PAPER, DataSettings

NAMES = (*FIGURES, *(f"{name}_ego" for name in EGO))
SCALES = ("full", "quick")


class Job(NamedTuple):
    """A run as commands.

    Attributes:
        run: what the figure asks for.
        command: of main.py, as settings.
        profile: flags of profiler.py for its timing table; None if it needs none.
        train: flags of main.py.
    """

    run: Run
    command: TrainCommand
    profile: list[str] | None
    train: list[str]

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.command.run.folder

    @property
    def table_folder(self) -> Path:
        """The folder of its timing table."""
        from elastic_trainer.timing.table import table_folder

        return table_folder(self.command.network, self.command.run.logdir)

    @property
    def has_table(self) -> bool:
        """Whether its timing table was made."""
        return (self.table_folder / "profile.json").is_file()

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to do. Raises `UserError` if its folder holds a run of other settings."""
        if self.run.profile_only:
            return self.has_table
        if not is_finished(self.folder):
            return False
        now, was = self.command.config, read_run(self.folder).config
        change = first_change(now, was, without_effect(now))
        if change is not None:
            raise UserError(f"{self.folder}: holds a run made with {change}; give another --logdir, or delete it")
        return True


def run_name(run: Run) -> str:
    """The name of its folder: all that distinguishes it from other runs under the same logdir."""
    short = {
        "interval": "interval",
        "importance_batches": "batches",
        "trained_layers": "layers",
        "num_epochs": "epochs",
    }
    parts = [run.model_name.rpartition("/")[2].replace(":", "-"), run.dataset_name, run.train_type]
    parts += [f"rho{100 * run.rho:g}"] if run.rho is not None else []
    parts += [f"{text}{getattr(run, name):g}" for name, text in short.items() if getattr(run, name) is not None]
    return "_".join([*parts, f"seed{run.seed}"])


def make_jobs(args: argparse.Namespace) -> list[Job]:
    """The runs of the figure that `args` (see `parse`) ask for, seed by seed."""
    name = args.name.removesuffix("_ego")
    runs: Sequence[Run] = FIGURES[name].runs
    if args.name != name:
        runs = [run for run in runs if run.is_elastic]
    is_quick = args.scale == "quick"
    runs = paper_figures.replaced(runs, args.dataset_name or ("digits" if is_quick else None), args.model_name)
    if is_quick and not args.model_name:
        runs = [run for run in runs if run.model_name != "vit"]  # its profile alone takes four minutes
        if args.name not in ("19", "19_ego", "table1"):
            runs = paper_figures.replaced(runs, None, "mobilenetv2")
    return [_job(replace(run, seed=seed), args) for seed in range(args.seeds) for run in runs]


def _job(run: Run, args: argparse.Namespace) -> Job:
    shared: dict[str, Any] = {"model_name": run.model_name, "dataset_name": run.dataset_name, "logdir": args.logdir}
    if args.scale == "quick":
        if run.model_name != "mobilenetv2":
            shared |= {"input_size": paper_figures.QUICK_SIZE, "weights": "none"}
        run = _quick(run, is_replaced=bool(args.model_name))
    for name in ("data_dir", "weights", "input_size", "batch_size"):
        if getattr(args, name) is not None:
            shared[name] = getattr(args, name)
    train = {**shared, **run.flags(), "run_name": run_name(run)}
    flags = [*as_words(train), *args.more]
    command = parse_training(flags)
    if command.network.num_classes is None:
        command = command.with_classes(_count_classes(command.data))
    profile = None
    if run.is_elastic:
        profile = profiler_flags(command.network, command.data, command.run.logdir)
        profile += ["--seconds", str(paper_figures.QUICK_SECONDS)] if args.scale == "quick" else []
    return Job(run, command, profile, [*flags, "--resume"])


def _quick(run: Run, is_replaced: bool) -> Run:
    """The same run at the quick scale; `is_replaced`: its network was chosen by the user."""
    epochs, interval = (run.num_epochs or PAPER["num_epochs"]), (run.interval or PAPER["interval"])
    run = replace(run, num_epochs=math.ceil(paper_figures.QUICK_SHARE * epochs))
    if run.is_elastic:
        run = replace(run, interval=math.ceil(paper_figures.QUICK_INTERVAL * interval))
    if run.model_name != "mobilenetv2" and not is_replaced:
        run = replace(run, num_epochs=1, max_steps=paper_figures.QUICK_STEPS)
    return run


def _count_classes(images: DataSettings) -> int:
    """Number of classes; the paper's data sets need not be there."""
    if images.dataset_name in paper_figures.CLASSES:
        return paper_figures.CLASSES[images.dataset_name]
    from elastic_trainer.datasets.sources import count_classes

    return count_classes(images.dataset_name, images.data_dir)


def image_counts(images: DataSettings) -> tuple[int, int]:
    """Number of training and of test images; the paper's data sets need not be there."""
    if images.dataset_name in paper_figures.IMAGES:
        return paper_figures.IMAGES[images.dataset_name]
    from elastic_trainer.datasets.sources import find

    source = find(images.dataset_name, images.data_dir, images.skip_broken, images.test_fraction)
    return source.train.count, source.test.count


def _counts(jobs: Sequence[Job]) -> dict[str, tuple[int, int]]:
    """`image_counts` by data set; each is read only once, since it may be a folder of photos."""
    images = {job.command.data.dataset_name: job.command.data for job in jobs}
    return {name: image_counts(one) for name, one in images.items()}


def estimated_hours(job: Job, images: tuple[int, int]) -> float | None:
    """Hours of training and testing by the timing table; None without one.

    For PruneTrain this is an upper bound, since its network gets faster.

    Args:
        job: a run.
        images: number of training and of test images.
    """
    if not job.has_table:
        return None
    model, table = plotting.network_and_table(job.command)
    from elastic_trainer.selection.schemes import trainable_mask

    command, training = job.command, job.command.training
    mask = trainable_mask(command.train_type, model, training.trained_layers)
    step_ms = min(table.predict_ms(mask), table.full_step_ms)
    if job.run.is_elastic:
        step_ms = training.rho * table.full_step_ms
    batch_size = command.network.batch_size
    schedule = Schedule.of(training, images[0] // batch_size)
    test_batches = schedule.epochs * math.ceil(images[1] / batch_size)
    return (schedule.total_steps * step_ms + test_batches * table.forward_ms) / 3.6e6


def dry_run(jobs: Sequence[Job], hours: tuple[float | None, float | None]) -> None:
    """List the runs, their state, and how long they would take here; `hours`: see `PaperFigure`."""
    load_tensorflow()
    total, unknown = 0.0, 0
    counts = _counts(jobs)
    for job in jobs:
        state = "complete" if job.is_complete else "started" if job.folder.is_dir() else "to do"
        estimate = None if job.run.profile_only else estimated_hours(job, counts[job.command.data.dataset_name])
        if state != "complete":
            total, unknown = total + (estimate or 0), unknown + (estimate is None)
        text = "?" if estimate is None else f"{estimate:.2f}" if estimate >= 0.01 else f"{estimate:.4f}"
        print(f"{state:8}  {text:>8} h  {job.command.run.run_name}")
    more = f" and {unknown} runs without a table" if unknown else ""
    print(f"to do here, training and testing by the timing tables, started runs in full: {total:.3g} h{more}")
    devices = [
        f"{value:g} h on a {name}"
        for value, name in zip(hours, ("Jetson TX2", "Raspberry Pi 4B"), strict=True)
        if value
    ]
    if devices:
        print(f"by the paper, or estimated from it: {', '.join(devices)}")


def carry_out(jobs: Sequence[Job]) -> None:
    """Profile and train what is missing. Raises `UserError` if a command fails; finished runs stay."""
    missing = [job for job in jobs if not job.is_complete]
    print(f"{len(jobs) - len(missing)} of {len(jobs)} runs are complete")
    for number, job in enumerate(missing, 1):
        print(f"run {number} of {len(missing)}: {job.command.run.run_name}", flush=True)
        if job.profile is not None and not job.has_table:
            _call("profiler.py", job.profile)
        if not job.run.profile_only:
            _call("main.py", job.train)


def _call(script: str, flags: Sequence[str]) -> None:
    """Run one of our scripts. It may save a checkpoint before a signal ends it.

    Raises:
        UserError: it failed.
        Stopped: a signal ended it.
    """
    with subprocess.Popen([sys.executable, ROOT / script, *flags]) as process:
        # Ctrl-C reaches both processes, SIGTERM only this one.
        handlers = {signal.SIGINT: lambda *_: None, signal.SIGTERM: lambda number, _: process.send_signal(number)}
        earlier = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            status = process.wait()
        finally:
            for number, handler in earlier.items():
                signal.signal(number, handler)
    if status in (128 + signal.SIGINT, 128 + signal.SIGTERM):
        raise Stopped(status - 128, "stopped; start it again to continue")
    if status:
        raise UserError(f"{script} {shlex.join(flags)}: ended with status {status}; start it again to continue")


def draw(
    plot: Sequence[str],
    jobs: Sequence[Job],
    stem: Path,
    reference: Mapping[Any, Any] | None = None,
    scale: str = "full",
) -> None:
    """Draw a figure from its finished runs.

    Args:
        plot: see `PaperFigure`.
        jobs: the runs.
        stem: of the files.
        reference: values of the paper, if they are to be marked.
        scale: one of `SCALES`.
    """
    import plot_accuracy_time
    import plot_bars
    import plot_costs
    import plot_epochs

    kind, *what = plot
    if what == ["profiling"]:
        counts = _counts(jobs)
        steps = {
            job.table_folder: counts[job.command.data.dataset_name][0] // job.command.network.batch_size for job in jobs
        }
        plot_costs.draw_profiling(steps, stem, reference, scale)
        return
    groups = plotting.group_runs([job.folder for job in jobs])
    if kind == "curves":
        print(plot_accuracy_time.table(groups))
        plot_accuracy_time.draw(groups, stem, reference, scale)
    elif kind == "bars":
        plot_bars.draw(groups, what, stem, reference, scale)
    else:
        subproblems = stem.with_name(f"{stem.name}_subproblems")
        if what == ["solver"] and not subproblems.with_name(f"{subproblems.name}.csv").is_file():
            plot_costs.draw_subproblems(subproblems, scale)
        marks = {} if reference is None else {"reference": reference}  # only plots with values of the paper take it
        {"epochs": plot_epochs, "costs": plot_costs}[kind].KINDS[what[0]](groups, stem, scale=scale, **marks)


def figure_parser() -> OneLineParser:
    """The flags of this script."""
    parser = OneLineParser(
        prog="run_figure.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", type=OneOf(NAMES), metavar="FIGURE", help=", ".join(NAMES))
    parser.add_argument("--dry_run", action="store_true", help="list the runs and the hours they would take; run none")
    parser.add_argument(
        "--scale",
        type=OneOf(SCALES),
        default="full",
        metavar="SCALE",
        help="full: the paper's data and settings; quick: the same figure on the handwritten digits, in minutes "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--seeds", type=count, default=1, metavar="N", help="runs of each setting (default: %(default)s)"
    )
    parser.add_argument(
        "--reference", action="store_true", help="mark the paper's values if the setting is the paper's"
    )
    group = parser.add_argument_group("instead of the paper's")
    for flag in ("dataset_name", "data_dir", "model_name", "weights", "input_size", "batch_size"):
        add_flag(group, MAIN_FLAGS[flag], default=None)
    parser.add_argument("--logdir", type=Path, metavar="DIR", help="default: logs/figures_<scale>")
    parser.add_argument("--output", type=stem_to_write, metavar="STEM", help="default: figures/figure<name>_<scale>")
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
    figure = FIGURES[name]
    jobs = make_jobs(args)
    if args.dry_run:
        dry_run(jobs, figure.hours)
        return
    carry_out(jobs)
    reference = paper_figures.REFERENCE.get(name) if args.reference else None
    if args.reference and reference is None:
        print(f"--reference: no values of the paper are known for {args.name}")
    draw(figure.plot, jobs, args.output, reference, args.scale)


if __name__ == "__main__":
    utils.run_cli(main)
