"""Flags that exclude each other, and flags without effect: a row each (no TensorFlow here)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from elastic_trainer.cli.exporters import EXPORTERS
from elastic_trainer.datasets.named import DATASETS
from elastic_trainer.selection.named import SCHEMES
from elastic_trainer.settings import Settings
from elastic_trainer.settings.network_names import WIDTHS, is_custom_model
from elastic_trainer.system.errors import UserError, not_one_of

_SCHEME = "cannot be combined with --train_type {train_type}"
_BOARD = "cannot be combined with --export {export}"


def is_elastic(run: Settings) -> bool:
    return SCHEMES[run.train_type].is_elastic


def is_for_board(run: Settings) -> bool:
    return run.export is not None and EXPORTERS[run.export].is_for_board


def _has_own_weights(run: Settings) -> bool:
    is_own = is_custom_model(run.model_name) and run.weights != "none"
    return is_own and (run.weights == "imagenet" or run.model_name.endswith(".keras"))


def check_names(settings: Settings, names: Mapping[str, Collection[str]]) -> None:
    """Raise `UserError` for a name in a record that this program does not know: another one may have added it."""
    for flag, known in names.items():
        value = getattr(settings, flag)
        if value is not None and value not in known:
            raise UserError(f"--{flag}: {not_one_of(value, [*known])}")


# Flags with a condition that excludes them, and the rest of the message.
EXCLUDED: tuple[tuple[str, Callable[[Settings], object], str], ...] = (
    ("weights", _has_own_weights, "{weights} is not for {model_name}, which has its own; leave it out"),
    ("alpha", lambda run: run.model_name not in WIDTHS, "{model_name} has one width only; leave it out"),
    ("deadline", lambda run: not SCHEMES[run.train_type].takes_steps, f"{_SCHEME}, which takes one step"),
    (
        "plan",
        lambda run: not is_elastic(run),
        "does not work with --train_type {train_type}, which has no timing table; in the plan of an elastic scheme, "
        "the row of rho 1 is full training",
    ),
    (
        "deterministic",
        lambda run: run.deadline,
        "cannot be combined with --deadline, which depends on the clock; leave one out",
    ),
    ("micro_batch", lambda run: run.train_type == "prunetrain", f"{_SCHEME}; leave it out"),
    (
        "export",
        lambda run: is_for_board(run) and not SCHEMES[run.train_type].can_split,  # as a board trains
        f"{_SCHEME}; give another",
    ),
    ("deadline", is_for_board, f"{_BOARD}; give it to board_train.py"),
    ("max_steps", is_for_board, f"{_BOARD}; give --num_epochs"),
    ("resume", is_for_board, f"{_BOARD}; nothing is trained here; leave it out"),
    (
        "augment",
        lambda run: is_for_board(run) and run.augment not in ("none", "flip"),
        f"{_BOARD}; boards have none, flip",
    ),
)
_LAST_LAYERS = "last_layers_training"
# Flags with a condition for their having an effect, and words for the runs in which they have.
USED: tuple[tuple[tuple[str, ...], Callable[[Settings], bool], str], ...] = (
    (("trained_layers",), lambda run: run.train_type == _LAST_LAYERS, f"--train_type {_LAST_LAYERS}"),
    (
        ("num_epochs", "max_steps", "learning_rate", "micro_batch"),
        lambda run: SCHEMES[run.train_type].takes_steps,
        "schemes other than closed_form_head",
    ),
    (("weight_decay",), lambda run: run.optimizer == "sgd", "--optimizer sgd"),
    (("rho", "interval", "importance_batches"), is_elastic, "elastic schemes"),
    (
        ("importance_batches",),
        lambda run: not is_elastic(run) or SCHEMES[run.train_type].importance not in (None, "weight_magnitude"),
        "schemes that measure importance on images",
    ),
)


def check(given: Mapping[str, Any], settings: Settings) -> None:
    """Raise `UserError` for the first flag that is given and that others, or the data set, exclude."""
    for flag in ("data_dir", "test_fraction"):
        if given.get(flag) and flag not in DATASETS[settings.dataset_name].flags:
            names = " or ".join(name for name, entry in DATASETS.items() if flag in entry.flags)
            raise UserError(f"--{flag}: works only with --dataset_name {names}, not {settings.dataset_name}")
    for flag, is_excluded, why in EXCLUDED:
        if given.get(flag) and is_excluded(settings):
            raise UserError(f"--{flag}: {why.format(**vars(settings))}")


def without_effect(given: Mapping[str, Any], settings: Settings) -> list[str]:
    """A line for each kind of runs for which alone some of the `given` flags have an effect, which this one is not."""
    is_here = not isinstance(given.get("resume"), Path)
    kinds = [*USED, (("logdir", "run_name"), lambda _: is_here, "runs that --resume DIR does not name")]
    found = []
    for flags, has_effect, runs in kinds:
        unused = [f"--{flag}" for flag in flags if flag in given]
        if unused and not has_effect(settings):
            found.append(f"{', '.join(unused)}: no effect here, only for {runs}")
    return found
