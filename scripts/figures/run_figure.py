#!/usr/bin/env python
"""Remake a figure or table of the paper: train the runs that are not there yet, then draw it from their logs.

Runs that are complete are not repeated, one that broke off goes on, and figures share runs. scripts/run_figure<name>.sh
call this. What goes behind -- is given to every call of main.py.

    python scripts/run_figure.py 15 --dry_run
    python scripts/run_figure.py 17ac --scale quick
    python scripts/run_figure.py 15 --dataset_name image_folder --data_dir photos -- --test_fraction 0.2
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
from paper_figures import EGO, FIGURES, Run

import utils
from elastic_trainer.cli import options
from elastic_trainer.cli.commands import profiler_flags
from elastic_trainer.cli.train_command import parse_main
from elastic_trainer.runs.config import as_config, first_change, without_effect
from elastic_trainer.settings import PAPER
from utils import Stopped, UserError

ROOT = Path(__file__).resolve().parents[2]
NAMES = (*FIGURES, *(f"{name}_ego" for name in EGO))


class Job(NamedTuple):
    """A run as commands: what makes its timing table (None: it needs none) and what trains it."""

    run: Run
    args: argparse.Namespace
    profile: list[str] | None
    train: list[str]

    @property
    def folder(self) -> Path:
        return self.args.logdir / self.args.run_name

    @property
    def has_table(self) -> bool:
        from elastic_trainer.timing.table import table_folder

        return (table_folder(self.args) / "profile.json").is_file()

    @property
    def is_complete(self) -> bool:
        """Raises `UserError` where a run of other settings is in its place."""
        if self.run.profile_only or not (self.folder / "summary.json").is_file():
            return self.run.profile_only and self.has_table
        now, was = as_config(self.args), plotting.read_run(self.folder).config
        change = first_change(now, was, without_effect(now))
        if change is not None:
            raise UserError(f"{self.folder}: holds a run made with {change}; give another --logdir, or delete it")
        return True


def run_name(run: Run) -> str:
    """Of its folder: all that tells it from other runs under the same logdir."""
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
    """The runs of the figure that `args` ask for, seed by seed."""
    name = args.name.removesuffix("_ego")
    runs: Sequence[Run] = FIGURES[name].runs
    if args.name != name:
        runs = [run for run in runs if run.is_elastic]
    is_quick = args.scale == "quick"
    runs = paper_figures.replaced(runs, args.dataset_name or ("digits" if is_quick else None), args.model_name)
    if is_quick and not args.model_name:
        runs = [run for run in runs if run.model_name != "vit"]  # whose profile alone takes four minutes
        if args.name not in ("19", "19_ego", "table1"):
            runs = paper_figures.replaced(runs, None, "mobilenetv2")
    return [_job(replace(run, seed=seed), args) for seed in range(args.seeds) for run in runs]


def _job(run: Run, args: argparse.Namespace) -> Job:
    network: dict[str, Any] = {"model_name": run.model_name, "dataset_name": run.dataset_name, "logdir": args.logdir}
    if args.scale == "quick":
        epochs, interval = (run.num_epochs or PAPER["num_epochs"]), (run.interval or PAPER["interval"])
        run = replace(run, num_epochs=math.ceil(paper_figures.QUICK_SHARE * epochs))
        if run.is_elastic:
            run = replace(run, interval=math.ceil(paper_figures.QUICK_SHARE * interval))
        if run.model_name != "mobilenetv2":
            network |= {"input_size": paper_figures.QUICK_SIZE, "weights": "none"}
            if not args.model_name:
                run = replace(run, num_epochs=1, max_steps=paper_figures.QUICK_STEPS)
    for name in ("data_dir", "weights", "input_size", "batch_size"):
        if getattr(args, name) is not None:
            network[name] = getattr(args, name)
    train = {**network, **run.flags(), "run_name": run_name(run)}
    flags = [*_flags(train), *args.more]
    parsed = parse_main(flags)
    if parsed.num_classes is None:
        parsed.num_classes = paper_figures.CLASSES.get(run.dataset_name)
    if parsed.num_classes is None:
        from elastic_trainer.datasets.sources import count_classes

        parsed.num_classes = count_classes(parsed.dataset_name, parsed.data_dir)
    profile = None
    if run.is_elastic:
        profile = [
            *profiler_flags(parsed),
            *(["--seconds", str(paper_figures.QUICK_SECONDS)] if args.scale == "quick" else []),
        ]
    return Job(run, parsed, profile, [*flags, "--resume"])


def _flags(values: dict[str, Any]) -> list[str]:
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def image_counts(args: argparse.Namespace) -> tuple[int, int]:
    """Images to train on and to test on."""
    if args.dataset_name in paper_figures.IMAGES:
        return paper_figures.IMAGES[args.dataset_name]
    from elastic_trainer.datasets.sources import find

    source = find(args.dataset_name, args.data_dir, args.skip_broken, args.test_fraction)
    return source.train.count, source.test.count


def _counts(jobs: Sequence[Job]) -> dict[str, tuple[int, int]]:
    """`image_counts` by data set, each looked at once: it may be a folder of photos."""
    args = {job.args.dataset_name: job.args for job in jobs}
    return {name: image_counts(one) for name, one in args.items()}


def estimated_hours(job: Job, images: tuple[int, int]) -> float | None:
    """Of training and testing, by the timing table; None without one. Of PruneTrain: at most, it gets faster."""
    from elastic_trainer.networks.tensors import trained_mask

    if not job.has_table:
        return None
    args = job.args
    model, table = plotting.network_and_table(args)
    step_ms = min(table.predict_ms(trained_mask(model, args.train_type, args.trained_layers)), table.full_step_ms)
    if job.run.is_elastic:
        step_ms = args.rho * table.full_step_ms
    in_epoch, tests = images[0] // args.batch_size, math.ceil(images[1] / args.batch_size)
    steps = min(args.num_epochs * in_epoch, args.max_steps or math.inf)
    return (steps * step_ms + math.ceil(steps / in_epoch) * tests * table.forward_ms) / 3.6e6


def dry_run(jobs: Sequence[Job], hours: tuple[float | None, float | None]) -> None:
    """List the runs, what there is of them, and how long they would take here."""
    utils.load_tensorflow()
    total, unknown = 0.0, 0
    counts = _counts(jobs)
    for job in jobs:
        state = "complete" if job.is_complete else "begun" if job.folder.is_dir() else "to do"
        estimate = None if job.run.profile_only else estimated_hours(job, counts[job.args.dataset_name])
        if state != "complete":
            total, unknown = total + (estimate or 0), unknown + (estimate is None)
        text = "?" if estimate is None else f"{estimate:.2f}" if estimate >= 0.01 else f"{estimate:.4f}"
        print(f"{state:8}  {text:>8} h  {job.args.run_name}")
    more = f" and {unknown} runs without a table" if unknown else ""
    print(f"to do here, training and testing by the timing tables, runs begun in full: {total:.3g} h{more}")
    told = [
        f"{value:g} h on a {name}"
        for value, name in zip(hours, ("Jetson TX2", "Raspberry Pi 4B"), strict=True)
        if value
    ]
    if told:
        print(f"by the paper, or estimated from it: {', '.join(told)}")


def carry_out(jobs: Sequence[Job]) -> None:
    """Profile and train what is missing. Raises `UserError` where a command fails; what is done stays."""
    missing = [job for job in jobs if not job.is_complete]
    print(f"{len(jobs) - len(missing)} of {len(jobs)} runs are complete")
    for number, job in enumerate(missing, 1):
        print(f"run {number} of {len(missing)}: {job.args.run_name}", flush=True)
        if job.profile is not None and not job.has_table:
            _call("profiler.py", job.profile)
        if not job.run.profile_only:
            _call("main.py", job.train)


def _call(script: str, flags: Sequence[str]) -> None:
    """Raises `UserError` where it fails, `Stopped` where a signal ended it. It may save a checkpoint before that."""
    with subprocess.Popen([sys.executable, ROOT / script, *flags]) as process:
        # Ctrl-C reaches both processes; SIGTERM this one alone.
        handlers = {signal.SIGINT: lambda *_: None, signal.SIGTERM: lambda number, _: process.send_signal(number)}
        earlier = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            status = process.wait()
        finally:
            for number, handler in earlier.items():
                signal.signal(number, handler)
    if status in (128 + signal.SIGINT, 128 + signal.SIGTERM):
        raise Stopped(status - 128, "stopped; started again, this goes on")
    if status:
        raise UserError(f"{script} {shlex.join(flags)}: ended with status {status}; started again, this goes on")


def draw(plot: Sequence[str], jobs: Sequence[Job], stem: Path, reference: Mapping[Any, Any] | None) -> None:
    import plot_accuracy_time
    import plot_bars
    import plot_costs
    import plot_epochs

    from elastic_trainer.timing.table import table_folder

    kind, *what = plot
    if what == ["profiling"]:
        counts = _counts(jobs)
        steps = {table_folder(job.args): counts[job.args.dataset_name][0] // job.args.batch_size for job in jobs}
        plot_costs.draw_profiling(steps, stem, reference)
        return
    groups = plotting.group_runs([job.folder for job in jobs])
    if kind == "curves":
        print(plot_accuracy_time.table(groups))
        plot_accuracy_time.draw(groups, stem, reference)
    elif kind == "bars":
        plot_bars.draw(groups, what, stem, reference)
    else:
        subproblems = stem.with_name(f"{stem.name}_subproblems")
        if what == ["solver"] and not subproblems.with_name(f"{subproblems.name}.csv").is_file():
            plot_costs.draw_subproblems(subproblems)
        marks = {} if reference is None else {"reference": reference}  # only those with values of the paper take them
        {"epochs": plot_epochs, "costs": plot_costs}[kind].KINDS[what[0]](groups, stem, **marks)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    given = [*(sys.argv[1:] if arguments is None else arguments)]
    split = given.index("--") if "--" in given else len(given)
    args = options.parse_figure(__doc__, NAMES, given[:split])
    args.more = given[split + 1 :]
    args.logdir = args.logdir or Path("logs") / f"figures_{args.scale}"
    args.output = args.output or Path("figures") / f"figure{args.name}_{args.scale}"
    return args


def main() -> None:
    args = parse()
    figure = FIGURES[args.name.removesuffix("_ego")]
    jobs = make_jobs(args)
    if args.dry_run:
        dry_run(jobs, figure.hours)
        return
    carry_out(jobs)
    reference = paper_figures.REFERENCE.get(args.name.removesuffix("_ego")) if args.reference else None
    if args.reference and reference is None:
        print(f"--reference: no values of the paper are known for {args.name}")
    plotting.SCALE = args.scale
    draw(figure.plot, jobs, args.output, reference)


if __name__ == "__main__":
    utils.run_cli(main)
