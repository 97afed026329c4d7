"""What all benchmarks share: their flags, the network that they measure, and the JSON that they print.

Importing this module puts the checkout on the import path, so a benchmark starts from any folder, and imports
TensorFlow quietly. It is imported first.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import data
import utils
from elastic_trainer.cli.commands import NAMES, to_profile
from elastic_trainer.datasets.image_data import ImageData
from elastic_trainer.settings import NETWORK, PROFILER_FLAGS, Settings
from elastic_trainer.settings.flags import OneLineParser
from elastic_trainer.system.machine import environment, load_tensorflow

ROOT = Path(__file__).resolve().parents[2]
load_tensorflow()


class Setting(NamedTuple):
    """A flag of one benchmark: its value without and with --quick, and help without the default."""

    default: Any
    quick: Any
    help: str


def run_benchmark(
    description: str | None,
    settings: dict[str, Setting],
    measure: Callable[[argparse.Namespace], dict[str, Any]],
    takes_network: bool = True,
) -> None:
    """A benchmark from its command line to its last line of output, its record as one JSON object.

    Args:
        description: for the help.
        settings: its own flags by name.
        measure: from the flags to what is recorded.
        takes_network: it has the flags of a network, and `measure` gets its settings as `network`.
    """

    def run() -> None:
        args = _parse(description, settings, takes_network)
        keys = ("model_name", "alpha", "input_size", "batch_size") if takes_network else ()
        record = {key: getattr(args.network, key) for key in keys}
        print(json.dumps({**record, **measure(args), "environment": environment()}))

    utils.run_cli(run)


def _parse(description: str | None, settings: dict[str, Setting], takes_network: bool) -> argparse.Namespace:
    parser = OneLineParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags = {name: flag for name, flag in PROFILER_FLAGS.items() if flag.section == NETWORK and takes_network}
    parser.add(flags, NAMES)
    parser.add_argument("--quick", action="store_true", help="a short try with fewer measurements")
    for name, (default, _, text) in settings.items():
        parser.add_argument(f"--{name}", type=type(default), help=f"{text} (default: {default})")
    args = parser.parse_args()
    for name, setting in settings.items():
        if getattr(args, name) is None:
            setattr(args, name, setting.quick if args.quick else setting.default)
    if takes_network:
        given = {name: value for name, value in vars(args).items() if name in flags}
        args.network = replace(to_profile(given), num_classes=10)
    return args


def few_digits(network: Settings, steps: int) -> ImageData:
    """Digits, cut to `steps` steps an epoch and one batch for the test."""
    digits = data.load(replace(network, dataset_name="digits", augment="none"))
    train, test = (
        split.part(np.arange(count))
        for split, count in (
            (digits.train_images, steps * network.batch_size),
            (digits.test_images, network.batch_size),
        )
    )
    return ImageData("digits", digits.class_names, train, test, network.batch_size, network.seed)
