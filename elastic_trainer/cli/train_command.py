"""The command line of main.py: a new run, a run to continue, or an evaluation."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from elastic_trainer.cli.commands import (
    EvaluateCommand,
    TrainCommand,
    check_folder_options,
    data_settings,
    fill_in_defaults,
    network_settings,
    recipe_settings,
    use_glyph_weights,
)
from elastic_trainer.cli.evaluate_command import parse_evaluation
from elastic_trainer.cli.flags import main_parser
from elastic_trainer.cli.parser import OneLineParser
from elastic_trainer.errors import UserError
from elastic_trainer.networks.names import model_label
from elastic_trainer.runs.config import with_later_options
from elastic_trainer.runs.power_record import check_growing
from elastic_trainer.runs.reader import read_config, started_with
from elastic_trainer.settings import RECIPES, RunSettings, Settings, is_elastic, measures_importance

LONGEST_NAME = 230  # bytes of a run's name; file systems allow 255, and files in the folder are named after it

# Flags that only some runs use: the flags, the runs that use them in words, and whether a run does.
_USED_BY: tuple[tuple[tuple[str, ...], str, Callable[[argparse.Namespace], bool]], ...] = (
    (
        ("rho", "interval", "correct_budget", "time_resolution", "allow_stale_profile", "importance_batches"),
        "elastic schemes",
        lambda args: is_elastic(args.train_type),
    ),
    (
        ("time_resolution", "importance_batches"),
        "schemes that select by importance",
        lambda args: measures_importance(args.train_type) or not is_elastic(args.train_type),
    ),
    (
        ("importance_batches",),
        "schemes that measure importance on images",
        lambda args: args.train_type != "elastic_training_weight_magnitude",
    ),
    (
        ("trained_layers",),
        "--train_type last_layers_training",
        lambda args: args.train_type == "last_layers_training",
    ),
    (
        ("prune_interval", "prune_ratio", "prune_threshold"),
        "--train_type prunetrain",
        lambda args: args.train_type == "prunetrain",
    ),
    (("weight_decay", "warmup"), "--optimizer sgd", lambda args: args.optimizer == "sgd"),
    (("head_learning_rate",), "--head_epochs of 1 or more", lambda args: args.head_epochs > 0),
    (("recipe",), "schemes other than prunetrain", lambda args: args.train_type != "prunetrain"),
    (
        ("logdir", "run_name", "overwrite"),
        "runs that --resume DIR does not name",
        lambda args: not isinstance(args.resume, Path),
    ),
)


def parse_main(arguments: Sequence[str] | None = None) -> TrainCommand | EvaluateCommand:
    """The command line of main.py. Raises `UserError` for a value out of range."""
    given = [*(sys.argv[1:] if arguments is None else arguments)]
    parser = main_parser()
    if parser.parse_args(given).evaluate is not None:
        return parse_evaluation(given)
    command = parse_training(given)
    if command.run.power_csv is not None and "power_csv" in parser.given(given):
        check_growing(command.run.power_csv)
    return command


def parse_training(given: Sequence[str]) -> TrainCommand:
    """A command line of main.py that trains. Raises `UserError` for a value out of range."""
    parser = main_parser()
    args = parser.parse_args(given)
    args.command = [*given]
    if isinstance(args.resume, Path):
        args = _as_started(parser, args.resume, given)
    args.train_type = args.train_type or recipe_settings(args)["train_type"]
    _check_combinations(args)
    _keep_model_to_export(parser, args, given)
    check_folder_options(args)
    if args.correct_budget is None:
        args.correct_budget = not args.deterministic
    chooses_epochs = args.deadline is not None and args.num_epochs is None and args.max_steps is None
    use_glyph_weights(args)
    fill_in_defaults(args)
    args.run_name = _run_name(args)
    warnings = _unused(args, parser.given(given))
    args.resume = args.resume is not None
    return TrainCommand(
        args.train_type,
        network_settings(args),
        data_settings(args),
        _training_settings(args),
        _run_settings(args),
        _plain_options(args),
        warnings,
        chooses_epochs,
    )


def _unused(args: argparse.Namespace, given: Sequence[str]) -> tuple[str, ...]:
    """A line on each row of `_USED_BY` whose flags were `given` to a run that does not use them."""
    found = (
        ([f"--{flag}" for flag in flags if flag in given], users) for flags, users, uses in _USED_BY if not uses(args)
    )
    return tuple(f"{', '.join(flags)}: without effect here, only for {users}" for flags, users in found if flags)


def _as_started(parser: OneLineParser, folder: Path, given: Sequence[str]) -> argparse.Namespace:
    """The options that the run in `folder` was started with, those `given` now added.

    Defaults of its recipe are those of that time, which may have changed since.
    """
    command = started_with(folder)
    args = parser.parse_args([*command, *given])
    before = with_later_options(read_config(folder))
    for name in {*RECIPES["robust"], "importance_batches"} & {*before} - {*parser.given([*command, *given])}:
        setattr(args, name, before[name])
    args.logdir, args.run_name, args.overwrite = folder.absolute().parent, folder.absolute().name, False
    args.command = command
    return args


def _check_combinations(args: argparse.Namespace) -> None:
    """Raise `UserError` for flags that exclude each other."""
    if args.resume and args.overwrite:
        raise UserError("--resume: does not go with --overwrite; leave one of the two out")
    elastic = is_elastic(args.train_type)
    if args.deadline is not None and (args.rho is not None or not elastic):
        other = "--rho; give one of the two" if elastic else f"--train_type {args.train_type}, which has no time budget"
        raise UserError(f"--deadline: does not go with {other}")
    if args.deterministic and (args.correct_budget or args.deadline is not None):
        other = "--deadline" if args.deadline is not None else "--correct_budget True"
        raise UserError(f"--deterministic: does not go with {other}, which follows the clock; leave one of the two out")
    if args.cached_views is not None and args.augment != "flip_rotate":
        raise UserError("--cached_views: goes with --augment flip_rotate only; leave it out")
    for name in ("head_epochs", "mixed_precision"):
        if getattr(args, name) and args.train_type == "prunetrain":
            raise UserError(f"--{name}: does not go with --train_type prunetrain; leave it out")


def _keep_model_to_export(parser: OneLineParser, args: argparse.Namespace, given: Sequence[str]) -> None:
    """`--export` needs the best model, so it is kept. Raises `UserError` if the command line forbids that.

    What a resumed run was started with gives way to what is `given` now.
    """
    now = parser.given(given)
    if args.export and not args.save_model:
        if "save_model" in now and "export" in now:
            raise UserError(f"--export {args.export}: needs the best model; leave out --save_model False")
        if "save_model" in now:
            args.export = None
        else:
            args.save_model = True


def _run_name(args: argparse.Namespace) -> str:
    """The run's name: as given, else made from the settings. Raises `UserError` for one that no folder can have."""
    if args.run_name is None:
        budget = f"_rho{args.rho:g}" if args.deadline is None else f"_deadline{args.deadline:g}"
        label = model_label(args.model_name, args.alpha)
        args.run_name = f"{label}_{args.dataset_name}_{args.train_type}{budget if is_elastic(args.train_type) else ''}"
    length = len(os.fsencode(args.run_name))
    if length > LONGEST_NAME:
        raise UserError(f"--run_name {args.run_name[:20]}…: has {length} bytes; give at most {LONGEST_NAME}")
    plain = args.run_name.isprintable() and Path(args.run_name).name == args.run_name
    if args.run_name in ("", ".", "..") or not plain:
        raise UserError(f"--run_name must be the plain name of a folder, not '{args.run_name}'")
    if args.run_name in ("profiles", "images"):
        raise UserError(f"--run_name must not be '{args.run_name}': that folder is for what several runs share")
    return args.run_name


def _training_settings(args: argparse.Namespace) -> Settings:
    return Settings(
        optimizer=args.optimizer,
        learning_rate=args.learning_rate,
        weight_decay=args.weight_decay,
        num_epochs=args.num_epochs,
        max_steps=args.max_steps,
        interval=args.interval,
        importance_batches=args.importance_batches,
        rho=args.rho,
        trained_layers=args.trained_layers,
        deadline=args.deadline,
        correct_budget=args.correct_budget,
        time_resolution=args.time_resolution,
        save_model=args.save_model,
        prune_interval=args.prune_interval,
        prune_ratio=args.prune_ratio,
        prune_threshold=args.prune_threshold,
        checkpoint_steps=args.checkpoint_steps,
        checkpoint_minutes=args.checkpoint_minutes,
        feature_cache=args.feature_cache,
        gradient_clipping=args.gradient_clipping or None,
        warmup=args.warmup,
        head_epochs=args.head_epochs,
        head_learning_rate=args.head_learning_rate,
    )


def _run_settings(args: argparse.Namespace) -> RunSettings:
    return RunSettings(
        logdir=args.logdir,
        run_name=args.run_name,
        resume=args.resume,
        overwrite=args.overwrite,
        deterministic=args.deterministic,
        allow_stale_profile=args.allow_stale_profile,
        save_txt=args.save_txt,
        export=args.export,
        power_csv=args.power_csv,
    )


def _plain_options(args: argparse.Namespace) -> dict[str, Any]:
    """Every option in JSON's types; rho is None where no share of a full step was asked for."""
    plain = (int, float, list, type(None))
    options = {name: value if isinstance(value, plain) else str(value) for name, value in vars(args).items()}
    has_rho = is_elastic(args.train_type) and args.deadline is None
    return {**options, "rho": args.rho if has_rho else None}
