"""Flags that exclude each other, or that a run of its kind cannot have: a row each."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import NamedTuple

from elastic_trainer.errors import UserError
from elastic_trainer.networks.names import WIDTHS, is_custom_model
from elastic_trainer.registry import SCHEMES


class Exclusion(NamedTuple):
    """A flag that others exclude."""

    flag: str
    others: Callable[[argparse.Namespace], object]  # all options -> whether they exclude it
    why: str  # the rest of the message, with {option} for values


def check_exclusions(args: argparse.Namespace, rows: Iterable[Exclusion]) -> None:
    """Raise `UserError` for the first flag that is given and that other options exclude."""
    for row in rows:
        if getattr(args, row.flag, None) and row.others(args):
            raise UserError(f"--{row.flag}: {row.why.format(**vars(args))}")


def _is_elastic(args: argparse.Namespace) -> bool:
    return SCHEMES[args.train_type].is_elastic


def _has_own_weights(args: argparse.Namespace) -> bool:
    if args.weights == "none" or not is_custom_model(args.model_name):
        return False
    return args.weights == "imagenet" or args.model_name.endswith(".keras")


NO_SCHEME = "cannot be combined with --train_type {train_type}"


def _of_schemes(flag: str) -> Exclusion:
    return Exclusion(flag, lambda args: flag in SCHEMES[args.train_type].excludes, f"{NO_SCHEME}; leave it out")


NETWORK = (
    Exclusion("weights", _has_own_weights, "{weights} is not for {model_name}, which has its own; leave it out"),
    Exclusion(
        "gradient_clipping",
        lambda args: args.optimizer != "sgd",
        "works only with --optimizer sgd, not {optimizer}; leave it out",
    ),
    Exclusion("alpha", lambda args: args.model_name not in WIDTHS, "{model_name} has one width only; leave it out"),
)
TRAINING = (
    Exclusion("deadline", lambda args: not _is_elastic(args), f"{NO_SCHEME}, which has no time budget"),
    Exclusion("deadline", lambda args: args.rho, "cannot be combined with --rho; leave one of them out"),
    Exclusion(
        "plan",
        lambda args: not _is_elastic(args),
        "does not work with --train_type {train_type}, which has no timing table; in the plan of an elastic scheme, "
        "the row of rho 1 is full training",
    ),
    Exclusion(
        "deterministic",
        lambda args: args.deadline,
        "cannot be combined with --deadline, which depends on the clock; leave one out",
    ),
    *(_of_schemes(flag) for flag in sorted({flag for entry in SCHEMES.values() for flag in entry.excludes})),
)
