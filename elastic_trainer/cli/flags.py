"""Every flag of main.py and profiler.py, declared once, with its range (no TensorFlow: mistakes are answered at once).

A flag that is not given takes the default of its data set (`settings.PAPER`, `settings.DIGITS`) or of the class in
settings.py that holds it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elastic_trainer.cli.parser import (
    OneLineParser,
    add_switch,
    count,
    duration,
    folder,
    network,
    number,
    one_of,
    share,
    truth,
    weights,
    whole_number,
)
from elastic_trainer.datasets.names import AUGMENTATIONS, DATASET_NAMES
from elastic_trainer.networks.names import MODEL_NAMES
from elastic_trainer.settings import (
    EXPORTS,
    FEATURE_CACHES,
    OPTIMIZERS,
    RECIPES,
    TIMINGS,
    TRAIN_TYPES,
    NetworkSettings,
    Settings,
)


def add_network_flags(parser: argparse.ArgumentParser) -> None:
    """What decides which network is built and how its step is timed: the same for profiler.py and main.py."""
    group = parser.add_argument_group("network and data")
    group.add_argument(
        "--model_name",
        type=network,
        metavar="NAME",
        help=", ".join(MODEL_NAMES)
        + ", any other of keras.applications such as efficientnetb0, or your own: FILE.keras, or FILE.py:FUNCTION, "
        "called with (height, width, 3) and the number of classes",
    )
    group.add_argument(
        "--input_size", type=whole_number(1, 4096), metavar="PIXELS", help="height and width of the input"
    )
    group.add_argument("--batch_size", type=whole_number(1, 65_536), metavar="N")
    group.add_argument("--num_classes", type=whole_number(2, 100_000), metavar="N", help="default: the data set's own")
    group.add_argument(
        "--weights",
        type=weights,
        metavar="imagenet|none|PATH",
        help="where the network starts from; PATH: .h5, .weights.h5, .keras, .npz (ViT), or the folder of a run",
    )
    group.add_argument(
        "--alpha", type=number(float, 0.01, 4, "from 0.01 to 4"), metavar="WIDTH", help="width of a MobileNet"
    )
    group.add_argument(
        "--optimizer",
        type=one_of([*OPTIMIZERS]),
        metavar="NAME",
        help="sgd (momentum 0.9, decoupled weight decay, cosine schedule) or adam (constant rate); "
        "default: adam for vit, sgd for the others",
    )
    group.add_argument(
        "--recipe",
        type=one_of([*RECIPES]),
        metavar="NAME",
        help="robust or paper: defaults of four flags (docs/flags.md); default: robust for image_folder, else paper",
    )
    group.add_argument(
        "--gradient_clipping",
        type=number(float, 0, 1e6, "a number of at least 0"),
        metavar="SHARE",
        help="with sgd: bound the norm of each gradient, but for the head's, by this share of its weights' norm; 0: "
        "no bound (default: by --recipe)",
    )
    add_switch(
        group,
        "--mixed_precision",
        "compute in bfloat16 (CPUs that have it) or float16 (GPUs); weights stay float32 (default: %(default)s)",
    )
    group.add_argument(
        "--seed", type=whole_number(0, 2**31 - 1), default=NetworkSettings.seed, help="default: %(default)s"
    )
    add_data_flags(group)
    group.add_argument("--logdir", type=folder, default=Path("logs"), metavar="DIR", help="default: %(default)s")


def add_data_flags(
    group: argparse._ActionsContainer,
    names: Sequence[str] = DATASET_NAMES,
    default: str | None = "digits",
    required: bool = True,
) -> None:
    """Without a `default` the name is `required`, or None."""
    group.add_argument(
        "--dataset_name",
        type=one_of(names),
        metavar="NAME",
        default=default,
        required=default is None and required,
        help=", ".join(names),
    )
    group.add_argument("--data_dir", type=Path, metavar="DIR", help="folder of the data set")


def add_test_fraction(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--test_fraction",
        type=number(float, 1e-9, 0.9, "above 0 and at most 0.9"),
        metavar="SHARE",
        help="of an image_folder without test/ and val/, the share of each class to test on",
    )


def _add_training_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    _add_scheme_flags(group)
    _add_budget_flags(group)
    _add_prunetrain_flags(group)
    _add_schedule_flags(group)
    _add_image_flags(group)
    _add_feature_flags(group)
    _add_repeatability_flags(group)


def _add_scheme_flags(group: argparse._ArgumentGroup) -> None:
    """Which tensors train."""
    group.add_argument(
        "--train_type",
        type=one_of(TRAIN_TYPES),
        metavar="SCHEME",
        help=", ".join(TRAIN_TYPES) + " (default: by --recipe)",
    )
    group.add_argument(
        "--trained_layers",
        type=count,
        default=Settings.trained_layers,
        metavar="N",
        help="last_layers_training: how many of the last layers with weights train (default: %(default)s)",
    )


def _add_budget_flags(group: argparse._ArgumentGroup) -> None:
    """How long a step, or all of training, may take."""
    group.add_argument("--rho", type=share, help="step time over a full step's that elastic training may take")
    group.add_argument(
        "--deadline",
        type=duration,
        metavar="TIME",
        help="instead of --rho: wall-clock time for all of training, in seconds, or as 90m or 2.5h",
    )
    group.add_argument(
        "--correct_budget",
        type=truth,
        metavar="True|False",
        help="measure how fast the device is before each selection, and correct the budget (default: True; False with "
        "--deterministic)",
    )
    group.add_argument(
        "--time_resolution",
        type=whole_number(10, 10_000_000),
        metavar="STEPS",
        help="time steps the solver counts the budget in (T_q); default: rounding costs below 0.1 %% of it",
    )


def _add_prunetrain_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--prune_interval",
        type=count,
        default=Settings.prune_interval,
        metavar="EPOCHS",
        help="prunetrain: epochs between two removals of channels (default: %(default)s)",
    )
    group.add_argument(
        "--prune_ratio",
        type=number(float, 0, 0.99, "from 0 to 0.99"),
        default=Settings.prune_ratio,
        metavar="SHARE",
        help="prunetrain: share of the group lasso in the first batch's loss (default: %(default)s)",
    )
    group.add_argument(
        "--prune_threshold",
        type=number(float, 0, 1e6, "a number of at least 0"),
        default=Settings.prune_threshold,
        metavar="SHARE",
        help="prunetrain: a channel is removed when each of its readers gets less than this share of what it got from "
        "a median channel at first (default: %(default)s)",
    )


def _add_schedule_flags(group: argparse._ArgumentGroup) -> None:
    """How long and how fast to train, and how often to select."""
    group.add_argument(
        "--interval",
        type=number(float, 1e-9, 1e9, "a number above 0"),
        metavar="EPOCHS",
        help="epochs between two selections; 0.5 is twice an epoch",
    )
    group.add_argument(
        "--importance_batches",
        type=count,
        metavar="N",
        default=Settings.importance_batches,
        help="batches that importance is measured on (default: %(default)s)",
    )
    group.add_argument("--num_epochs", type=whole_number(1, 1_000_000), metavar="N")
    group.add_argument(
        "--head_epochs",
        type=whole_number(0, 1_000_000),
        default=Settings.head_epochs,
        metavar="N",
        help="epochs before these, in which the head alone trains (default: %(default)s)",
    )
    rate: dict[str, Any] = {"type": number(float, 1e-12, 100, "above 0 and at most 100"), "metavar": "RATE"}
    default = Settings.head_learning_rate
    group.add_argument("--head_learning_rate", **rate, default=default, help=f"in these (default: {default:g})")
    group.add_argument(
        "--max_steps", type=count, metavar="N", help="end after this many steps in all, schedule included"
    )
    group.add_argument("--learning_rate", **rate)
    group.add_argument(
        "--warmup",
        type=number(float, 0, 0.9, "from 0 to 0.9"),
        metavar="SHARE",
        help="with sgd: share of the steps in which the learning rate rises to its highest (default: by --recipe)",
    )
    group.add_argument(
        "--weight_decay", type=number(float, 0, 100, "from 0 to 100"), metavar="RATE", help="decoupled; with sgd only"
    )


def _add_image_flags(group: argparse._ArgumentGroup) -> None:
    add_test_fraction(group)
    group.add_argument(
        "--skip_broken", action="store_true", help="of an image_folder, leave out images that cannot be decoded"
    )
    group.add_argument(
        "--image_memory",
        type=number(float, 0, 1e9, "a number of MB of at least 0"),
        metavar="MB",
        help="what decoded images may take in memory; more go into a file under --logdir (default: a quarter of what "
        "is available)",
    )
    group.add_argument("--augment", type=one_of(AUGMENTATIONS), metavar="KIND", help=", ".join(AUGMENTATIONS))
    group.add_argument(
        "--cached_views",
        type=count,
        metavar="K",
        help="with --augment flip_rotate: keep K views of each image and draw from them (default: new ones each epoch)",
    )


def _add_feature_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--feature_cache",
        type=one_of(FEATURE_CACHES),
        default=Settings.feature_cache,
        metavar="KIND",
        help="how to keep what the frozen layers below the trained ones compute from each image, where that saves "
        "time: float32, float16 (half the room), or off, as in the paper (default: %(default)s)",
    )


def _add_repeatability_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--allow_stale_profile",
        action="store_true",
        help="use a timing table made with another TensorFlow, on another machine or before the network changed anyway",
    )
    add_switch(
        group,
        "--deterministic",
        "two runs with one seed agree bit for bit: TensorFlow's deterministic operations, no clock in the choices",
    )


def _add_resume_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("long runs")
    group.add_argument(
        "--resume",
        type=Path,
        nargs="?",
        const=True,
        metavar="DIR",
        help="continue the run in DIR, with the options it was started with; without DIR, continue the run that the "
        "other options name, or start it if it does not exist",
    )
    group.add_argument(
        "--checkpoint_minutes",
        type=number(float, 0, 1e6, "a number of at least 0"),
        default=Settings.checkpoint_minutes,
        metavar="MINUTES",
        help="minutes from one checkpoint to the next (default: %(default)g)",
    )
    group.add_argument("--checkpoint_steps", type=count, metavar="N", help="a checkpoint every N steps as well")


def _add_output_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--run_name", metavar="NAME", help="folder under --logdir; default: made from the settings")
    group.add_argument("--overwrite", action="store_true", help="replace the run of that name, do not number this one")
    for flag, text in (
        ("--save_model", "keep best.keras and last.keras in the run's folder"),
        ("--save_txt", "write training hours and best accuracy in per cent to <run_name>.txt, as the paper's scripts"),
    ):
        add_switch(group, flag, text)
    group.add_argument(
        "--power_csv",
        type=Path,
        metavar="FILE",
        help="record of an external power meter (time,watts), read when training is over; for a finished run with "
        "--resume DIR",
    )
    group.add_argument(
        "--export",
        type=one_of(EXPORTS),
        metavar="FORMAT",
        help="tflite: write the best model for TensorFlow Lite, float and quantised, and check both; keeps the model "
        "as --save_model does",
    )
    group.add_argument(
        "--evaluate",
        type=Path,
        metavar="PATH",
        help="train nothing: test the model of a run's folder, or any .keras file, class by class",
    )


def main_parser() -> OneLineParser:
    """The flags of main.py."""
    parser = OneLineParser([profiler_parser], prog="main.py", description="Train one network under one scheme.")
    add_network_flags(parser)
    _add_training_flags(parser)
    _add_resume_flags(parser)
    _add_output_flags(parser)
    return parser


def profiler_parser() -> OneLineParser:
    """The flags of profiler.py."""
    parser = OneLineParser(
        [main_parser], prog="profiler.py", description="Measure what each tensor of a network costs to train."
    )
    add_network_flags(parser)
    group = parser.add_argument_group("operation times")
    group.add_argument(
        "--timing",
        type=one_of(TIMINGS),
        default="trace",
        metavar="SOURCE",
        help="trace (each operation's measured time) or flops (counted, scaled to the measured step); "
        "default: %(default)s",
    )
    group.add_argument(
        "--seconds",
        type=number(float, 0, 86_400, "seconds from 0 to 86,400"),
        metavar="SECONDS",
        help="time for measuring steps; five rounds are made in any case (default: 110)",
    )
    group.add_argument(
        "--from_trace",
        type=Path,
        metavar="FILE",
        help="a board's *.xplane.pb: plan for that board, measure nothing here",
    )
    return parser
