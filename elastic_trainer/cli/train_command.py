"""The command line of main.py: a new run, a run to continue, or an evaluation."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from elastic_trainer.cli.commands import (
    HEAD_ALONE,
    EvaluateCommand,
    TrainCommand,
    fill_in_defaults,
    recipe_settings,
)
from elastic_trainer.cli.evaluate_command import parse_evaluation
from elastic_trainer.cli.exclusions import TRAINING, check_exclusions
from elastic_trainer.cli.flags import main_parser
from elastic_trainer.cli.parser import OneLineParser
from elastic_trainer.errors import UserError
from elastic_trainer.networks.names import model_label
from elastic_trainer.registry import CHECKS, DATASETS, EXPORTERS, RETIMED, SCHEMES
from elastic_trainer.runs.reader import started_with
from elastic_trainer.settings import MAIN_FLAGS

MAX_NAME_BYTES = 230  # of a run's name; file systems allow 255, and files in the folder are named after it


def parse_main(arguments: Sequence[str] | None = None) -> TrainCommand | EvaluateCommand:
    """The command line of main.py. Raises `UserError` for wrong flags."""
    words = [*(sys.argv[1:] if arguments is None else arguments)]
    return parse_evaluation(words) if "evaluate" in main_parser().given(words) else parse_training(words)


def parse_training(words: Sequence[str], chosen: Sequence[str] = ()) -> TrainCommand:
    """A command line of main.py that trains: words of the user, and others that a program has `chosen`.

    Raises `UserError` for wrong flags.
    """
    parser = main_parser()
    args, given = parser.parse_args([*chosen, *words]), parser.given(words)
    args.command = [*words]
    if isinstance(args.resume, Path):
        args = _as_started(parser, args.resume, words)
    args.train_type = args.train_type or recipe_settings(args)["train_type"]
    check_exclusions(args, TRAINING)
    for check in CHECKS:
        check(args)
    _keep_model_to_export(args, given)
    unset = {name for name, value in vars(args).items() if value is None}
    fill_in_defaults(args)
    if args.deterministic:
        args.validation_share = 1.0  # else the clock decides
    args.run_name = _run_name(args)
    warnings = _unused(args, given)
    args.resume = bool(args.resume)
    command = TrainCommand(vars(args), frozenset(unset & _open_names(args, unset)), warnings)
    return command.choose(**HEAD_ALONE) if args.train_type == HEAD_ALONE["train_type"] else command


def _open_names(args: argparse.Namespace, unset: set[str]) -> set[str]:
    """Names of the options that this run chooses for itself, if they are `unset`."""
    trains_here = not any(getattr(args, name) for name in RETIMED)
    if args.export is not None:
        trains_here &= not EXPORTERS[args.export].is_untrained
    names = set()
    if args.deadline is not None and {"num_epochs", "max_steps"} <= unset:
        names |= {"num_epochs", "interval"}
    if args.deadline is None and SCHEMES[args.train_type].is_elastic:
        names.add("rho")
    if DATASETS[args.dataset_name].count_images is not None:
        names.add("batch_size")
    if args.recipe == "robust" and SCHEMES[args.train_type].takes("micro_batch") and trains_here:
        names.add("micro_batch")
    if "learning_rate" in recipe_settings(args):
        names.add("learning_rate")
    return names


def _unused(args: argparse.Namespace, given: Sequence[str]) -> tuple[str, ...]:
    """Warnings about the `given` flags that have no effect in this run."""
    found: dict[str, list[str]] = {}
    for name in given:
        users = next((use.words for use in MAIN_FLAGS[name].used_by if not use.holds(vars(args))), None)
        if users is not None:
            found.setdefault(users, []).append(f"--{name}")
    return tuple(f"{', '.join(flags)}: no effect here, only for {users}" for users, flags in found.items())


def _as_started(parser: OneLineParser, folder: Path, words: Sequence[str]) -> argparse.Namespace:
    """The options that the run in `folder` was started with, and those given now."""
    command = started_with(folder)
    args = parser.parse_args([*command, *words])
    args.logdir, args.run_name = folder.absolute().parent, folder.absolute().name
    args.command = command
    return args


def _keep_model_to_export(args: argparse.Namespace, given: Sequence[str]) -> None:
    """Save the best model if `--export` needs it. In a resumed run, the flags `given` now take precedence."""
    if args.export and not EXPORTERS[args.export].is_untrained and not args.save_model:
        if {"save_model", "export"} <= {*given}:
            raise UserError(f"--export {args.export}: needs the best model; leave out --save_model False")
        if "save_model" in given:
            args.export = None
        else:
            args.save_model = True


def _run_name(args: argparse.Namespace) -> str:
    """The run's name: as given, else made from the settings; `auto` is the published default."""
    if args.run_name in (None, "auto"):
        budget = f"_rho{args.rho:g}" if args.deadline is None else f"_deadline{args.deadline:g}"
        label = model_label(args.model_name, args.alpha)
        args.run_name = f"{label}_{args.dataset_name}_{args.train_type}"
        args.run_name += budget if SCHEMES[args.train_type].is_elastic else ""
    length = len(os.fsencode(args.run_name))
    if length > MAX_NAME_BYTES:
        raise UserError(f"--run_name {args.run_name[:20]}…: has {length} bytes; give at most {MAX_NAME_BYTES}")
    plain = args.run_name.isprintable() and Path(args.run_name).name == args.run_name
    if args.run_name in ("", ".", "..") or not plain:
        raise UserError(f"--run_name: must be the name of a folder without its path, not '{args.run_name}'")
    if args.run_name in ("profiles", "images"):
        raise UserError(
            f"--run_name: '{args.run_name}' is reserved for files that several runs share; choose another name"
        )
    return args.run_name
