"""The commands as typed settings, complete and checked (no TensorFlow here)."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from elastic_trainer.cli.flags import profiler_parser
from elastic_trainer.cli.parser import as_words
from elastic_trainer.datasets.batches import part_rows
from elastic_trainer.errors import UserError
from elastic_trainer.networks.names import GLYPH_WEIGHTS, WIDTHS, is_custom_model
from elastic_trainer.options import built
from elastic_trainer.registry import DATASETS, OPTIMIZERS, SCHEMES, users
from elastic_trainer.settings import (
    CLIPPING,
    RECIPES,
    DataSettings,
    NetworkSettings,
    ProfileSettings,
    RunSettings,
    Settings,
    defaults_of,
    rate_at,
)


@dataclass(frozen=True)
class TrainCommand:
    """One run: `main.py`.

    Attributes:
        options: every option by name, as in config.json.
        warnings: lines about flags that have no effect.
        chooses_epochs, chooses_interval: the number of epochs, and with it the interval of selections, is to be
            derived from the deadline.
        chooses_batch: the batch may be smaller than the default.
        chooses_parts: the batch may be taken in parts, by a recipe that fits memory.
        rate_follows_batch: the learning rate is that of a recipe for this batch size.
        extra: values of the flags of extensions, by name.
        images_mb: MB of images that may stay in memory, where --image_memory does not say; None: see `images.read`.
    """

    network: NetworkSettings
    data: DataSettings
    training: Settings
    run: RunSettings
    options: dict[str, Any]
    warnings: tuple[str, ...] = ()
    chooses_epochs: bool = False
    chooses_interval: bool = False
    chooses_batch: bool = False
    chooses_parts: bool = False
    rate_follows_batch: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)
    images_mb: float | None = None

    @property
    def train_type(self) -> str:
        """Name of the scheme."""
        return self.run.train_type

    @property
    def config(self) -> dict[str, Any]:
        """The options as config.json keeps them."""
        training, network = self.training, self.network
        names = ("num_epochs", "interval", "max_steps", "learning_rate", "micro_batch")
        chosen = {name: getattr(training, name) for name in names}
        chosen |= {"num_classes": network.num_classes, "batch_size": network.batch_size, "train_type": self.train_type}
        return {**self.options, **chosen}

    @property
    def part(self) -> NetworkSettings:
        """The network with the size of a part of a batch as its batch size, as the timing table has it."""
        return replace(self.network, batch_size=part_rows(self.network.batch_size, self.training.micro_batch))

    def with_classes(self, count: int) -> TrainCommand:
        """A copy for `count` classes, unless the number was given."""
        return replace(self, network=self.network.with_classes(count))

    def with_epochs(self, epochs: int, interval: float) -> TrainCommand:
        """A copy with this number of epochs, and with this interval of selections unless one was given."""
        interval = interval if self.chooses_interval else self.training.interval
        training = replace(self.training, num_epochs=epochs, interval=interval)
        return replace(self, training=training, chooses_epochs=False, chooses_interval=False)

    def with_batch(self, batch_size: int) -> TrainCommand:
        """A copy with this batch size, and with the learning rate that goes with it."""
        training = self.training
        if self.rate_follows_batch:
            training = replace(training, learning_rate=rate_at(RECIPES[self.run.recipe]["learning_rate"], batch_size))
        network = replace(self.network, batch_size=batch_size)
        return replace(self, network=network, training=training, chooses_batch=False)

    def with_parts(self, rows: int | None) -> TrainCommand:
        """A copy that takes a batch in parts of so many images, or at once: None, or all of them."""
        micro_batch = None if rows == self.network.batch_size else rows
        return replace(self, training=replace(self.training, micro_batch=micro_batch), chooses_parts=False)

    def with_closed_form(self) -> TrainCommand:
        """A copy that solves for the head and takes no other step."""
        run = replace(self.run, train_type="closed_form_head")
        return replace(self, run=run, chooses_epochs=False, chooses_interval=False).with_one_step()

    def with_one_step(self) -> TrainCommand:
        """A copy of a run that has one step, if its scheme has no more."""
        if not SCHEMES[self.train_type].is_closed_form:
            return self
        return replace(self, training=replace(self.training, num_epochs=1, max_steps=1))

    def with_choices_of(self, config: dict[str, Any]) -> TrainCommand:
        """A copy with what a run with this config.json chose, as far as this command chooses it, too."""
        command = self.with_batch(config["batch_size"]) if self.chooses_batch else self
        command = command.with_parts(config.get("micro_batch")) if self.chooses_parts else command
        if self.chooses_epochs and SCHEMES[config["train_type"]].is_closed_form:
            return command.with_closed_form()
        return command.with_epochs(config["num_epochs"], config["interval"]) if self.chooses_epochs else command


@dataclass(frozen=True)
class EvaluateCommand:
    """One evaluation: `main.py --evaluate`.

    Attributes:
        model: the .keras file.
        folder: folder for the results.
        model_name: the user's function that builds the network, where Keras cannot load it without custom layers.
        input_size, num_classes: None if neither the command line nor the run gives it.
        export: format to export the model to, or None.
        class_names: the classes that the model was trained on, in the order of its outputs; None if unknown.
        trained_network: what the run recorded of its network, see `runs.config.network_record`.
        allow_tensorflow_kernels: whether the export may need them.
    """

    model: Path
    folder: Path
    data: DataSettings
    model_name: str | None
    input_size: int | None
    num_classes: int | None
    batch_size: int
    seed: int
    export: str | None
    class_names: list[str] | None
    trained_network: dict[str, str] | None
    allow_tensorflow_kernels: bool


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
        args.weights = args.weights or "none"  # times do not depend on them
    fill_in_defaults(args)
    network, data = built(NetworkSettings, vars(args)), built(DataSettings, vars(args))
    return ProfileCommand(network=network, data=data, logdir=args.logdir, **vars(built(ProfileSettings, vars(args))))


# --- what several commands share --------------------------------------------------------------------------------------


def fill_in_defaults(args: argparse.Namespace) -> None:
    """Set the options that were not given to their defaults. Raises `UserError` for options that do not suit others."""
    alpha_given = args.alpha is not None
    check_data_options(args)
    fits_glyphs = args.model_name in (None, "mobilenetv2") and args.alpha in (None, 0.35)
    if args.dataset_name == "digits" and fits_glyphs and args.weights is None:
        args.weights = str(GLYPH_WEIGHTS)
    if is_custom_model(args.model_name):
        if args.weights is None:
            args.weights = "none"
        elif args.weights != "none" and (args.weights == "imagenet" or args.model_name.endswith(".keras")):
            raise UserError(f"--weights {args.weights}: {args.model_name} has its own weights; leave it out")
    if args.mixed_precision and args.model_name is not None and args.model_name.endswith(".keras"):
        raise UserError(f"--mixed_precision: {args.model_name} keeps the precision it was saved with; leave it out")
    args.optimizer = _optimizer(args)
    if args.gradient_clipping and "gradient_clipping" not in OPTIMIZERS[args.optimizer].uses:
        raise UserError(
            f"--gradient_clipping: works only with --optimizer {users(OPTIMIZERS, 'gradient_clipping')}, not "
            f"{args.optimizer}; leave it out"
        )
    if is_custom_model(args.model_name) and getattr(args, "save_model", 0) is None:
        args.save_model = False  # Keras may not be able to save it
    for name, value in {**defaults_of(args.dataset_name), **recipe_settings(args)}.items():
        if getattr(args, name, 0) is None:
            setattr(args, name, value)
    if args.model_name not in WIDTHS:
        if alpha_given:
            raise UserError(f"--alpha: {args.model_name} has one width only; leave it out")
        args.alpha = 1.0


def _optimizer(args: argparse.Namespace) -> str:
    """The optimizer that was given, else the paper's for this network."""
    return args.optimizer or ("adam" if args.model_name == "vit" else "sgd")


def recipe_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The options that the recipe sets for this run, unless they are given.

    Adam and PruneTrain use the paper's settings. Networks with random weights use the paper's scheme, since the upper
    part alone would leave the lower layers random.
    """
    own, train_type = RECIPES["paper"], getattr(args, "train_type", None)
    recipe = {**RECIPES[args.recipe or defaults_of(args.dataset_name)["recipe"]]}
    changes_network = train_type is not None and SCHEMES[train_type].changes_network
    if changes_network or not {"gradient_clipping", "warmup"} <= {*OPTIMIZERS[_optimizer(args)].uses}:
        return own
    if args.weights == "none" or (is_custom_model(args.model_name) and not args.model_name.endswith(".keras")):
        recipe["train_type"] = own["train_type"]
    if "learning_rate" in recipe:
        batch_size = args.batch_size or defaults_of(args.dataset_name)["batch_size"]
        recipe["learning_rate"] = rate_at(recipe["learning_rate"], batch_size)
    return recipe


def check_data_options(args: argparse.Namespace) -> None:
    """Raise `UserError` for options that the data set does not use."""
    for name in ("data_dir", "skip_broken", "test_fraction"):
        if getattr(args, name, None) and name not in DATASETS[args.dataset_name].uses:
            raise UserError(
                f"--{name}: works only with --dataset_name {users(DATASETS, name)}, not {args.dataset_name}"
            )


def profiler_command(network: NetworkSettings, data: DataSettings, logdir: Path) -> str:
    """The command line that makes the timing table of these settings."""
    return shlex.join(["python", "profiler.py", *profiler_flags(network, data, logdir)])


def profiler_flags(network: NetworkSettings, data: DataSettings, logdir: Path) -> list[str]:
    """The flags of profiler.py that make the timing table of these settings. Those that equal a default, too."""
    names = ("input_size", "num_classes", "batch_size", "optimizer", "mixed_precision", "seed", "weights")
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
