"""The commands as typed settings, complete and checked (no TensorFlow here)."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from elastic_trainer.cli.exclusions import NETWORK, check_exclusions
from elastic_trainer.cli.flags import profiler_parser
from elastic_trainer.cli.parser import as_words
from elastic_trainer.datasets.batches import part_rows
from elastic_trainer.errors import UserError
from elastic_trainer.networks.names import GLYPH_WEIGHTS, WIDTHS, is_custom_model
from elastic_trainer.options import from_options
from elastic_trainer.registry import DATASETS, RETIMED, SCHEMES, users
from elastic_trainer.runs.config import FREE_ON_RESUME, changed_images, first_change
from elastic_trainer.runs.reader import is_run, read_config
from elastic_trainer.settings import (
    CLIPPING,
    MAIN_FLAGS,
    RECIPES,
    DataSettings,
    NetworkSettings,
    ProfileSettings,
    RunSettings,
    Settings,
    defaults_of,
    rate_at,
)

HEAD_ALONE = {"train_type": "closed_form_head", "num_epochs": 1, "max_steps": 1}  # solved for in one step


@dataclass(frozen=True)
class TrainCommand:
    """One run: `main.py`."""

    options: Mapping[str, Any]  # all, by name
    open: frozenset[str] = frozenset()  # names of those that the run chooses for itself, in `cli.resolve`
    warnings: tuple[str, ...] = ()  # lines about flags that have no effect

    @cached_property
    def network(self) -> NetworkSettings:
        return from_options(NetworkSettings, self.options)

    @cached_property
    def data(self) -> DataSettings:
        return from_options(DataSettings, self.options)

    @cached_property
    def training(self) -> Settings:
        return from_options(Settings, self.options)

    @cached_property
    def run(self) -> RunSettings:
        return from_options(RunSettings, self.options)

    @property
    def train_type(self) -> str:
        """Name of the scheme."""
        return self.run.train_type

    @property
    def trains_elsewhere(self) -> bool:
        """Whether the run is planned in times of another device, whose memory is not known."""
        return any(self.options[name] for name in RETIMED)

    @property
    def config(self) -> dict[str, Any]:
        """The options as config.json keeps them: as JSON types; rho is None for runs that do not use it."""
        options = {name: self.options[name] for name in (*MAIN_FLAGS, "command")}
        if not SCHEMES[self.train_type].is_elastic or options["deadline"] is not None:
            options["rho"] = None
        plain = (int, float, list, type(None))
        return {name: value if isinstance(value, plain) else str(value) for name, value in options.items()}

    @property
    def part(self) -> NetworkSettings:
        """The network with the size of a part of a batch as its batch size, as the timing table has it."""
        return replace(self.network, batch_size=part_rows(self.network.batch_size, self.training.micro_batch))

    def choose(self, **values: Any) -> TrainCommand:
        """A copy with these options, which are then no longer open; an open learning rate follows the batch size."""
        if "batch_size" in values and "learning_rate" in self.open:
            rate = rate_at(RECIPES["robust"]["learning_rate"], values["batch_size"])
            values = {"learning_rate": rate, **values}
        return replace(self, options={**self.options, **values}, open=self.open - {*values})

    def with_classes(self, count: int) -> TrainCommand:
        """A copy for `count` classes, unless the number was given."""
        return self if self.network.num_classes else self.choose(num_classes=count)

    def with_choices_of(self, config: dict[str, Any]) -> TrainCommand:
        """A copy that reuses the recorded choices of a run, by its config.json, that this command leaves open."""
        values = {name: config[name] for name in self.open if name in config}
        if "num_epochs" in values and config["train_type"] == HEAD_ALONE["train_type"]:
            values |= HEAD_ALONE
        return self.choose(**values)


def continued(command: TrainCommand, images: dict[str, Any] | None = None) -> TrainCommand:
    """The command, or a copy with the recorded choices of the run that it continues.

    Raises `UserError` if that run was started with other options, or with other `images`: `ImageData.record` of those
    there are now, or None while they are not known.
    """
    folder = command.run.folder
    if not command.run.resume or not is_run(folder):
        return command
    before = read_config(folder)
    command = command.with_choices_of(before)
    change = first_change(command.config, before, FREE_ON_RESUME)
    if change is None and images is not None:
        change = changed_images(images, before["images"])
    if change is not None:
        raise UserError(
            f"--resume: the run in {folder} was started with {change}; use the same, or give another --run_name"
        )
    return command


@dataclass(frozen=True)
class EvaluateCommand:
    """One evaluation: `main.py --evaluate`. None stands for what neither the command line nor the run says."""

    model: Path  # the .keras file
    folder: Path  # for the results
    data: DataSettings
    model_name: str | None  # the user's function that builds the network, where Keras cannot load it without
    input_size: int | None
    num_classes: int | None
    batch_size: int
    seed: int
    export: str | None
    class_names: list[str] | None  # that the model was trained on, in the order of its outputs


@dataclass(frozen=True, kw_only=True)
class ProfileCommand(ProfileSettings):
    """One profile: `profiler.py`."""

    network: NetworkSettings
    data: DataSettings
    logdir: Path


def parse_profiler(arguments: Sequence[str] | None = None) -> ProfileCommand:
    """The command line of profiler.py. Raises `UserError` for a value out of range."""
    args = profiler_parser().parse_args(arguments)
    if args.from_trace is not None:
        if args.timing != "trace":
            raise UserError(f"--timing {args.timing}: cannot be combined with --from_trace; leave one of them out")
        if not args.from_trace.is_file():
            raise UserError(f"--from_trace {args.from_trace}: no such file; give a *.xplane.pb written by tf.profiler")
    args.weights = args.weights or "none"  # times do not depend on them, and nothing has to be downloaded
    fill_in_defaults(args)
    network, data = from_options(NetworkSettings, vars(args)), from_options(DataSettings, vars(args))
    return ProfileCommand(
        network=network, data=data, logdir=args.logdir, **vars(from_options(ProfileSettings, vars(args)))
    )


# --- what several commands share --------------------------------------------------------------------------------------


def fill_in_defaults(args: argparse.Namespace) -> None:
    """Set the options that were not given to their defaults. Raises `UserError` for options that do not suit others."""
    check_data_options(args)
    defaults = defaults_of(args.dataset_name)
    args.model_name = args.model_name or defaults["model_name"]
    args.optimizer = _optimizer(args)
    check_exclusions(args, NETWORK)
    if args.weights is None and is_custom_model(args.model_name):
        args.weights = "none"
    elif args.dataset_name == "digits" and args.model_name == "mobilenetv2" and args.alpha in (None, 0.35):
        args.weights = args.weights or str(GLYPH_WEIGHTS)
    if args.model_name not in WIDTHS:
        args.alpha = 1.0
    if is_custom_model(args.model_name):
        defaults["save_model"] = False  # Keras may not be able to save it
    for name, value in {**defaults, **recipe_settings(args)}.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)


def _optimizer(args: argparse.Namespace) -> str:
    return args.optimizer or ("adam" if args.model_name == "vit" else "sgd")


def recipe_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The options that the recipe sets for this run, unless they are given.

    Adam and PruneTrain use the paper's settings. Networks with random weights use the paper's scheme, since the upper
    part alone would leave the lower layers random.
    """
    paper, train_type = RECIPES["paper"], getattr(args, "train_type", None)
    recipe = {**RECIPES[args.recipe or defaults_of(args.dataset_name)["recipe"]]}
    if _optimizer(args) != "sgd" or (train_type is not None and not SCHEMES[train_type].takes("recipe")):
        return paper
    if args.weights == "none" or (is_custom_model(args.model_name) and not args.model_name.endswith(".keras")):
        recipe["train_type"] = paper["train_type"]
    if "learning_rate" in recipe:
        batch_size = args.batch_size or defaults_of(args.dataset_name)["batch_size"]
        recipe["learning_rate"] = rate_at(recipe["learning_rate"], batch_size)
    return recipe


def check_data_options(args: argparse.Namespace) -> None:
    """Raise `UserError` for options that the data set does not use."""
    for name in ("data_dir", "test_fraction"):
        if getattr(args, name, None) and name not in DATASETS[args.dataset_name].uses:
            raise UserError(
                f"--{name}: works only with --dataset_name {users(DATASETS, name)}, not {args.dataset_name}"
            )


def profiler_command(network: NetworkSettings, data: DataSettings, logdir: Path) -> str:
    """The command line that makes the timing table of these settings."""
    return shlex.join(["python", "profiler.py", *profiler_flags(network, data, logdir)])


def profiler_flags(network: NetworkSettings, data: DataSettings, logdir: Path) -> list[str]:
    """The flags of profiler.py that make the timing table of these settings. Those that equal a default, too."""
    names = ("input_size", "num_classes", "batch_size", "optimizer", "seed")
    flags = {
        "model_name": network.model_name,
        "dataset_name": data.dataset_name,
        "alpha": network.alpha if network.model_name in WIDTHS else None,
        **{name: getattr(network, name) for name in names},
        "gradient_clipping": CLIPPING if network.clips_gradients else 0,  # times do not depend on how much
        "data_dir": data.data_dir,
        "logdir": logdir,
    }
    return as_words({name: value for name, value in flags.items() if value is not None and value is not False})
