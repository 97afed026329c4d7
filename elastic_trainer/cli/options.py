"""Every command-line option, declared once, with its range and its default (no TensorFlow here: mistakes answer fast).

Two sets of defaults. `PAPER` holds the settings of the paper's experiments (section 6). `DIGITS` holds those of the
`digits` data set, which needs no download and trains in a minute on two cores. An option that is not given takes the
value of its data set's row.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from elastic_trainer.datasets.names import DATASET_NAMES, TFDS_NAMES
from elastic_trainer.networks.names import (
    AUGMENTATIONS,
    GLYPH_WEIGHTS,
    KERAS_NETWORKS,
    MODEL_NAMES,
    WIDTHS,
    is_own_model,
)
from elastic_trainer.settings import DIGITS, ELASTIC_TYPES, EXPORTS, OPTIMIZERS, PAPER, TIMINGS, TRAIN_TYPES
from utils import UserError

# Options that may change when a run goes on.
FREE_ON_RESUME = {"data_dir", "logdir", "run_name", "command", "resume", "overwrite", "save_txt", "export", "evaluate"}
FREE_ON_RESUME |= {"checkpoint_minutes", "checkpoint_steps", "image_memory", "power_csv"}
DATA_COMMANDS = ("show", "prepare", "pack", "unpack")


class _OneLineParser(argparse.ArgumentParser):
    """Mistakes become a `UserError`. No flag may be shortened: what it stands for would change as flags are added."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        kind, _, rest = message.partition("unrecognized arguments: ")
        raise UserError(self._unknown(rest.split()) if not kind and rest else message.replace("argument ", "", 1))

    def _unknown(self, words: list[str]) -> str:
        """What to say of words that belong to no flag."""
        word = next((word for word in words if word.startswith("-")), None)
        if word is None:
            return f"'{words[0]}' belongs to no flag; each value stands behind its flag, such as --seed 1"
        flag = word.partition("=")[0]
        for other in (_main_parser(), _profiler_parser()):
            if flag in other._option_string_actions and other.prog != self.prog:
                return f"{flag}: is a flag of {other.prog}, not of {self.prog}"
        hint = _did_you_mean(flag, [known for known in self._option_string_actions if known.startswith("--")])
        return f"{flag}: there is no such flag{hint or '; --help lists them'}"


def _did_you_mean(text: str, names: Sequence[str]) -> str:
    """`; did you mean '…'?` with the one of `names` that is most like `text`, or nothing if none is."""
    by_lower = {name.lower(): name for name in names}
    near = difflib.get_close_matches(text.lower(), by_lower, n=1)
    return f"; did you mean '{by_lower[near[0]]}'?" if near else ""


def _number(kind: type, low: float, high: float, rule: str) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be {rule}, not '{text}'")
        return value

    return parse


def _whole_number(low: int, high: int) -> Callable[[str], int]:
    return _number(int, low, high, f"a whole number from {low:,} to {high:,}")


# Upper bounds lie far beyond any use and before what a slip of the finger would make of a device's memory.
_count = _whole_number(1, 1_000_000_000)
_share = _number(float, 1e-9, 1, "above 0 and at most 1")


def _duration(text: str) -> float:
    """Seconds, from seconds or minutes or hours."""
    unit = {"s": 1, "m": 60, "h": 3600}.get(text[-1:])
    try:
        seconds = float(text[:-1]) * unit if unit else float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise argparse.ArgumentTypeError(f"must be a time above 0 such as 3600, 90m or 2.5h, not '{text}'")
    return seconds


def _one_of(names: Sequence[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text in names:
            return text
        raise argparse.ArgumentTypeError(f"'{text}' is not one of {', '.join(names)}{_did_you_mean(text, names)}")

    return parse


def _network(text: str) -> str:
    """A network we know, in any case, a .keras file, or file.py:function; the file must be there."""
    file, colon, function = text.rpartition(":")
    if colon and file.endswith(".py"):
        if not function.isidentifier():
            raise argparse.ArgumentTypeError(f"'{text}': '{function}' is no name of a function; give file.py:function")
    elif text.endswith(".keras"):
        file = text
    elif text.endswith(".py"):
        raise argparse.ArgumentTypeError(f"'{text}': name the function that makes the model, as {text}:function")
    else:
        known = dict.fromkeys((*MODEL_NAMES, *(name.lower() for name in KERAS_NETWORKS)))
        if text.lower() in known:
            return text.lower()
        raise argparse.ArgumentTypeError(
            f"'{text}' is not one of {', '.join(MODEL_NAMES)}, FILE.keras, FILE.py:FUNCTION, or a network of "
            f"keras.applications{_did_you_mean(text, [*known])}"
        )
    if not Path(file).is_file():
        raise argparse.ArgumentTypeError(f"there is no file '{file}'")
    return os.path.normpath(text)


def _weights(text: str) -> str:
    """imagenet, none, or the path of a file or of a run's folder, which must be there."""
    if text in ("imagenet", "none") or (text and Path(text).exists()):
        return text
    hint = _did_you_mean(text, ("imagenet", "none"))
    raise argparse.ArgumentTypeError(
        f"'{text}' is neither imagenet nor none, and there is no such file or folder of a run{hint}"
    )


def _truth(text: str) -> bool:
    """The paper's scripts pass True and False as words."""
    if text.lower() not in ("true", "false", "1", "0"):
        raise argparse.ArgumentTypeError(f"must be True or False, not '{text}'")
    return text.lower() in ("true", "1")


def _add_switch(group: argparse._ArgumentGroup, flag: str, text: str) -> None:
    """A flag that is off, and that is turned on with or without the word True behind it."""
    group.add_argument(flag, type=_truth, nargs="?", const=True, default=False, metavar="True|False", help=text)


def _add_network_options(parser: argparse.ArgumentParser) -> None:
    """What decides which network is built and how its step is timed: the same for profiler.py and main.py."""
    group = parser.add_argument_group("network and data")
    group.add_argument(
        "--model_name",
        type=_network,
        metavar="NAME",
        help=", ".join(MODEL_NAMES)
        + ", any other of keras.applications such as efficientnetb0, or your own: FILE.keras, or FILE.py:FUNCTION, "
        "called with (height, width, 3) and the number of classes",
    )
    group.add_argument(
        "--input_size", type=_whole_number(1, 4096), metavar="PIXELS", help="height and width of the input"
    )
    group.add_argument("--batch_size", type=_whole_number(1, 65_536), metavar="N")
    group.add_argument("--num_classes", type=_whole_number(2, 100_000), metavar="N", help="default: the data set's own")
    group.add_argument(
        "--weights",
        type=_weights,
        metavar="imagenet|none|PATH",
        help="where the network starts from; PATH: .h5, .weights.h5, .keras, .npz (ViT), or the folder of a run",
    )
    group.add_argument(
        "--alpha", type=_number(float, 0.01, 4, "from 0.01 to 4"), metavar="WIDTH", help="width of a MobileNet"
    )
    group.add_argument("--augment", type=_one_of(AUGMENTATIONS), metavar="KIND", help=", ".join(AUGMENTATIONS))
    group.add_argument(
        "--optimizer",
        type=_one_of(OPTIMIZERS),
        metavar="NAME",
        help="sgd (momentum 0.9, decoupled weight decay, cosine schedule) or adam (constant rate); "
        "default: adam for vit, sgd for the others",
    )
    _add_switch(
        group,
        "--mixed_precision",
        "compute in bfloat16 (CPUs that have it) or float16 (GPUs); weights stay float32 (default: %(default)s)",
    )
    group.add_argument("--seed", type=_whole_number(0, 2**31 - 1), default=0, help="default: %(default)s")
    _add_data_options(group)
    group.add_argument("--logdir", type=Path, default=Path("logs"), metavar="DIR", help="default: %(default)s")


def _add_data_options(
    group: argparse._ActionsContainer,
    names: Sequence[str] = DATASET_NAMES,
    default: str | None = "digits",
    required: bool = True,
) -> None:
    """Without a `default` the name is `required`, or None."""
    group.add_argument(
        "--dataset_name",
        type=_one_of(names),
        metavar="NAME",
        default=default,
        required=default is None and required,
        help=", ".join(names),
    )
    group.add_argument("--data_dir", type=Path, metavar="DIR", help="folder of the data set")


def _add_test_fraction(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--test_fraction",
        type=_number(float, 1e-9, 0.9, "above 0 and at most 0.9"),
        metavar="SHARE",
        help="of an image_folder without test/ and val/, the share of each class to test on",
    )


def _add_training_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument(
        "--train_type",
        type=_one_of(TRAIN_TYPES),
        default="elastic_training",
        metavar="SCHEME",
        help=", ".join(TRAIN_TYPES) + " (default: %(default)s)",
    )
    group.add_argument(
        "--trained_layers",
        type=_count,
        default=1,
        metavar="N",
        help="last_layers_training: how many of the last layers with weights train (default: %(default)s)",
    )
    group.add_argument("--rho", type=_share, help="step time over a full step's that elastic training may take")
    group.add_argument(
        "--deadline",
        type=_duration,
        metavar="TIME",
        help="instead of --rho: wall-clock time for all of training, in seconds, or as 90m or 2.5h",
    )
    group.add_argument(
        "--correct_budget",
        type=_truth,
        metavar="True|False",
        help="measure how fast the device is before each selection, and correct the budget (default: True; False with "
        "--deterministic)",
    )
    group.add_argument(
        "--time_resolution",
        type=_whole_number(10, 10_000_000),
        metavar="STEPS",
        help="time steps the solver counts the budget in (T_q); default: rounding costs below 0.1 %% of it",
    )
    group.add_argument(
        "--prune_interval",
        type=_count,
        default=2,
        metavar="EPOCHS",
        help="prunetrain: epochs between two removals of channels (default: %(default)s)",
    )
    group.add_argument(
        "--prune_ratio",
        type=_number(float, 0, 0.99, "from 0 to 0.99"),
        default=0.25,
        metavar="SHARE",
        help="prunetrain: share of the group lasso in the first batch's loss (default: %(default)s)",
    )
    group.add_argument(
        "--prune_threshold",
        type=_number(float, 0, 1e6, "a number of at least 0"),
        default=0.7,
        metavar="SHARE",
        help="prunetrain: a channel is removed when each of its readers gets less than this share of what it got from "
        "a median channel at first (default: %(default)s)",
    )
    group.add_argument(
        "--interval",
        type=_number(float, 1e-9, 1e9, "a number above 0"),
        metavar="EPOCHS",
        help="epochs between two selections; 0.5 is twice an epoch",
    )
    group.add_argument(
        "--importance_batches",
        type=_count,
        default=1,
        metavar="N",
        help="batches that importance is measured on (default: %(default)s)",
    )
    group.add_argument("--num_epochs", type=_whole_number(1, 1_000_000), metavar="N")
    group.add_argument(
        "--max_steps", type=_count, metavar="N", help="end after this many steps in all, schedule included"
    )
    group.add_argument("--learning_rate", type=_number(float, 1e-12, 100, "above 0 and at most 100"), metavar="RATE")
    group.add_argument(
        "--weight_decay", type=_number(float, 0, 100, "from 0 to 100"), metavar="RATE", help="decoupled; with sgd only"
    )
    _add_test_fraction(group)
    group.add_argument(
        "--skip_broken", action="store_true", help="of an image_folder, leave out images that cannot be decoded"
    )
    group.add_argument(
        "--image_memory",
        type=_number(float, 0, 1e9, "a number of MB of at least 0"),
        metavar="MB",
        help="what decoded images may take in memory; more go into a file under --logdir (default: a quarter of what "
        "is available)",
    )
    group.add_argument(
        "--allow_stale_profile",
        action="store_true",
        help="use a timing table made with another TensorFlow or on another machine all the same",
    )
    _add_switch(
        group,
        "--deterministic",
        "two runs with one seed agree bit for bit: TensorFlow's deterministic operations, no clock in the choices",
    )
    group = parser.add_argument_group("leaving it alone")
    group.add_argument(
        "--resume",
        type=Path,
        nargs="?",
        const=True,
        metavar="DIR",
        help="go on with the run in DIR, with the options it was begun with; without DIR, with the run that the other "
        "options name, which is begun if it is not there",
    )
    group.add_argument(
        "--checkpoint_minutes",
        type=_number(float, 0, 1e6, "a number of at least 0"),
        default=10.0,
        metavar="MINUTES",
        help="minutes from one checkpoint to the next (default: %(default)g)",
    )
    group.add_argument("--checkpoint_steps", type=_count, metavar="N", help="a checkpoint every N steps as well")
    group = parser.add_argument_group("output")
    group.add_argument("--run_name", metavar="NAME", help="folder under --logdir; default: made from the settings")
    group.add_argument("--overwrite", action="store_true", help="replace the run of that name, do not number this one")
    for flag, text in (
        ("--save_model", "keep best.keras and last.keras in the run's folder"),
        ("--save_txt", "write training hours and best accuracy in per cent to <run_name>.txt, as the paper's scripts"),
    ):
        _add_switch(group, flag, text)
    group.add_argument(
        "--power_csv",
        type=Path,
        metavar="FILE",
        help="record of an external power meter (time,watts), read when training is over; for a finished run with "
        "--resume DIR",
    )
    group.add_argument(
        "--export",
        type=_one_of(EXPORTS),
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


def _filled_in(args: argparse.Namespace) -> argparse.Namespace:
    """Every option that was not given takes its data set's default."""
    alpha_given = args.alpha is not None
    _check_data_dir(args)
    if is_own_model(args.model_name):
        if args.weights is None:
            args.weights = "none"
        elif args.weights != "none" and (args.weights == "imagenet" or args.model_name.endswith(".keras")):
            raise UserError(f"--weights {args.weights}: {args.model_name} brings its own weights; leave it out")
    if args.mixed_precision and args.model_name is not None and args.model_name.endswith(".keras"):
        raise UserError(f"--mixed_precision: {args.model_name} keeps the precision it was saved with; leave it out")
    defaults = DIGITS if args.dataset_name == "digits" else PAPER
    for name, value in defaults.items():
        if getattr(args, name, 0) is None:
            setattr(args, name, value)
    if args.model_name not in WIDTHS:
        if alpha_given:
            raise UserError(f"--alpha: {args.model_name} has one width only; leave it out")
        args.alpha = 1.0
    if args.optimizer is None:
        args.optimizer = "adam" if args.model_name == "vit" else "sgd"
    return args


def _main_parser() -> _OneLineParser:
    parser = _OneLineParser(prog="main.py", description="Train one network under one scheme.")
    _add_network_options(parser)
    _add_training_options(parser)
    return parser


def parse_main(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of main.py, complete. Raises `UserError` for a value out of range."""
    parser = _main_parser()
    given = [*(sys.argv[1:] if arguments is None else arguments)]
    args = parser.parse_args(given)
    if args.evaluate is not None:
        return _for_evaluation(parser, given)
    if isinstance(args.resume, Path):
        folder = args.resume
        command = _recorded_command(folder)
        args = parser.parse_args([*command, *given])
        args.logdir, args.run_name, args.overwrite = folder.absolute().parent, folder.absolute().name, False
    else:
        command = given
    args.command, args.resume = command, args.resume is not None
    if args.resume and args.overwrite:
        raise UserError("--resume: does not go with --overwrite; leave one of the two out")
    if args.export and not args.save_model:
        if "save_model" in _given(parser, [*command, *given]):
            raise UserError(f"--export {args.export}: needs the best model; leave out --save_model False")
        args.save_model = True
    elastic = args.train_type in ELASTIC_TYPES
    if args.deadline is not None and (args.rho is not None or not elastic):
        other = "--rho; give one of the two" if elastic else f"--train_type {args.train_type}, which has no time budget"
        raise UserError(f"--deadline: does not go with {other}")
    if args.deterministic and (args.correct_budget or args.deadline is not None):
        other = "--deadline" if args.deadline is not None else "--correct_budget True"
        raise UserError(f"--deterministic: does not go with {other}, which follows the clock; leave one of the two out")
    if args.mixed_precision and args.train_type == "prunetrain":
        raise UserError("--mixed_precision: does not go with --train_type prunetrain; leave it out")
    if args.correct_budget is None:
        args.correct_budget = not args.deterministic
    _check_folder_options(args)
    _use_glyph_weights(args)
    args = _filled_in(args)
    if args.run_name is None:
        budget = f"_rho{args.rho:g}" if args.deadline is None else f"_deadline{args.deadline:g}"
        args.run_name = f"{model_label(args)}_{args.dataset_name}_{args.train_type}{budget if elastic else ''}"
    plain = args.run_name.isprintable() and Path(args.run_name).name == args.run_name
    if args.run_name in ("", ".", "..") or not plain:
        raise UserError(f"--run_name must be the plain name of a folder, not '{args.run_name}'")
    if args.run_name in ("profiles", "images"):
        raise UserError(f"--run_name must not be '{args.run_name}': that folder is for what several runs share")
    return args


def _check_folder_options(args: argparse.Namespace) -> None:
    for name in ("skip_broken", "test_fraction"):
        if getattr(args, name, None) and args.dataset_name != "image_folder":
            raise UserError(f"--{name}: goes with --dataset_name image_folder only")


def _recorded_command(folder: Path) -> list[str]:
    """The options that the run in `folder` was begun with."""
    try:
        return [*map(str, json.loads((folder / "config.json").read_text(encoding="utf-8"))["command"])]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--resume {folder}: is not the folder of a run: its config.json cannot be read; give one, as logs/my_run"
        ) from error


# What may be said beside --evaluate; the first come from the run's config.json where they are left out.
_FROM_RUN = (
    "dataset_name",
    "data_dir",
    "input_size",
    "num_classes",
    "batch_size",
    "augment",
    "model_name",
    "skip_broken",
    "test_fraction",
)
_WITH_EVALUATE = (*_FROM_RUN, "logdir", "image_memory", "export", "evaluate")


def _given(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> list[str]:
    """Names of the options that a command line gives, whatever their value."""
    absent = object()
    names = [action.dest for action in parser._actions if action.dest != "help"]
    found = vars(parser.parse_args(arguments, argparse.Namespace(**dict.fromkeys(names, absent))))
    return [name for name in names if found[name] is not absent]


def _for_evaluation(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of `--evaluate`: those that are not given are taken from the run that the model is from.

    `evaluate` becomes the .keras file and `folder` where results go. `input_size` and `num_classes` stay None where
    nothing tells; `model_name` is None but for a function of the user's that makes the network anew.
    """
    given = _given(parser, arguments)
    unfit = next((name for name in given if name not in _WITH_EVALUATE), None)
    if unfit:
        raise UserError(f"--{unfit}: does not go with --evaluate, which trains nothing; leave it out")
    args = parser.parse_args(arguments)
    model = _model_file(args.evaluate)
    config = _run_config(model.parent)
    taken = {name: config.get(name) for name in _FROM_RUN}
    if "dataset_name" in given and args.dataset_name != taken["dataset_name"]:
        taken["data_dir"] = taken["num_classes"] = None  # they belong to the run's own data set
    own_code = ".py:" in (args.model_name if "model_name" in given else taken["model_name"] or "")
    if "model_name" in given and not own_code:
        raise UserError(
            f"--model_name {args.model_name}: --evaluate takes the network from its file; leave it out "
            "(FILE.py:FUNCTION may be given, for a network with layers of its own)"
        )
    if not own_code:
        taken["model_name"] = None
    parser.set_defaults(**{name: value for name, value in taken.items() if value is not None})
    args = parser.parse_args(arguments)
    defaults = DIGITS if args.dataset_name == "digits" else PAPER
    args.batch_size = args.batch_size or defaults["batch_size"]
    args.augment = args.augment or defaults["augment"]
    args.evaluate = model
    args.folder, args.resume, args.run_name = args.logdir / f"evaluated_{model.stem}", False, None
    if config:
        args.folder = model.parent if model.stem == "best" else model.parent / model.stem
    return args


def _model_file(path: Path) -> Path:
    """The .keras file that `--evaluate` means."""
    if path.is_dir():
        if not (path / "best.keras").is_file():
            raise UserError(f"--evaluate {path}: holds no best.keras; a run keeps it with --save_model or --export")
        return path / "best.keras"
    if path.suffix != ".keras":
        raise UserError(f"--evaluate {path}: must be the folder of a run or a file that ends in .keras")
    if not path.is_file():
        raise UserError(f"--evaluate {path}: there is no such file")
    return path


def as_config(args: argparse.Namespace) -> dict[str, Any]:
    """The options of a run as config.json keeps them."""
    plain = (int, float, list, type(None))
    config = {name: value if isinstance(value, plain) else str(value) for name, value in vars(args).items()}
    elastic = args.train_type in ELASTIC_TYPES
    return {**config, "rho": args.rho if elastic and args.deadline is None else None}


def without_effect(config: dict[str, Any]) -> set[str]:
    """Options that the result of a run does not follow from: photos of one's own are told by their folder alone."""
    return FREE_ON_RESUME - ({"data_dir"} if config["dataset_name"] == "image_folder" else set())


def first_change(now: dict[str, Any], begun: dict[str, Any], free: set[str]) -> str | None:
    """The first option, but for those in `free`, in which two configurations differ, as "--name was, not is"."""
    for name, value in now.items():
        unknown_yet = name == "num_classes" and value is None
        if name not in free and not unknown_yet and value != begun.get(name, value):
            return f"--{name} {begun[name]}, not {value}"
    return None


def _run_config(folder: Path) -> dict[str, Any]:
    """What the run in `folder` was begun with; empty where there is no run."""
    path = folder / "config.json"
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise UserError(f"--evaluate: {path} cannot be read: {error}; mend or remove it") from error


def _profiler_parser() -> _OneLineParser:
    parser = _OneLineParser(prog="profiler.py", description="Measure what each tensor of a network costs to train.")
    _add_network_options(parser)
    group = parser.add_argument_group("operation times")
    group.add_argument(
        "--timing",
        type=_one_of(TIMINGS),
        default="trace",
        metavar="SOURCE",
        help="trace (each operation's measured time) or flops (counted, scaled to the measured step); "
        "default: %(default)s",
    )
    group.add_argument(
        "--seconds",
        type=_number(float, 0, 86_400, "seconds from 0 to 86,400"),
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


def parse_profiler(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of profiler.py, complete. Raises `UserError` for a value out of range."""
    args = _profiler_parser().parse_args(arguments)
    if args.from_trace is not None:
        if args.timing != "trace":
            raise UserError(f"--timing {args.timing}: --from_trace takes the times of its file; leave one of them out")
        if not args.from_trace.is_file():
            raise UserError(f"--from_trace {args.from_trace}: no such file; give a *.xplane.pb that tf.profiler wrote")
        args.weights = args.weights or "none"  # times do not depend on them
    _use_glyph_weights(args)
    return _filled_in(args)


def parse_data(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of data.py; `command` is one of `DATA_COMMANDS`. Raises `UserError` for a value out of range."""
    parser = _OneLineParser(prog="data.py", description="Look at, prepare and carry data sets.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="|".join(DATA_COMMANDS))
    show = commands.add_parser("show", help="images of each class as a table and a picture")
    _add_data_options(show)
    _add_test_fraction(show)
    show.add_argument("--output", type=Path, metavar="STEM", help="without _train.png; default: figures/<name>")
    prepare = commands.add_parser("prepare", help="download a data set and prepare it")
    _add_data_options(prepare, TFDS_NAMES, None)
    pack = commands.add_parser("pack", help="put a data set into one file")
    _add_data_options(pack, (*TFDS_NAMES, "image_folder"), None)
    pack.add_argument("--output", type=Path, metavar="FILE", help="default: <name>.tar")
    unpack = commands.add_parser("unpack", help="take a data set out of the file and check it")
    unpack.add_argument("archive", type=_existing_file, metavar="FILE")
    unpack.add_argument("--data_dir", type=Path, required=True, metavar="DIR", help="folder it is put into")
    args = parser.parse_args(arguments)
    if args.command == "show":
        _check_data_dir(args)
        _check_folder_options(args)
        args.output = args.output or Path("figures") / args.dataset_name
    return args


def _existing_file(text: str) -> Path:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no file '{text}'")
    return Path(text)


def _check_data_dir(args: argparse.Namespace) -> None:
    if args.data_dir is not None and args.dataset_name == "digits":
        raise UserError("--data_dir: digits needs none; give --dataset_name image_folder for images of your own")


def parse_figure(description: str | None, names: Sequence[str], arguments: Sequence[str]) -> argparse.Namespace:
    """The options of scripts/run_figure.py. Raises `UserError` for a value out of range."""
    parser = _OneLineParser(
        prog="run_figure.py", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", type=_one_of(names), metavar="FIGURE", help=", ".join(names))
    parser.add_argument("--dry_run", action="store_true", help="list the runs and the hours they would take; run none")
    parser.add_argument(
        "--scale",
        type=_one_of(("full", "quick")),
        default="full",
        metavar="SCALE",
        help="full: the paper's data and settings; quick: the same figure on the embedded digits, in minutes "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--seeds", type=_count, default=1, metavar="N", help="runs of each setting (default: %(default)s)"
    )
    parser.add_argument("--reference", action="store_true", help="mark the paper's own values where the setting is its")
    group = parser.add_argument_group("in the place of the paper's")
    _add_data_options(group, default=None, required=False)
    group.add_argument("--model_name", type=_network, metavar="NAME")
    group.add_argument("--weights", type=_weights, metavar="imagenet|none|PATH")
    group.add_argument("--input_size", type=_whole_number(1, 4096), metavar="PIXELS")
    group.add_argument("--batch_size", type=_whole_number(1, 65_536), metavar="N")
    parser.add_argument("--logdir", type=Path, metavar="DIR", help="default: logs/figures_<scale>")
    parser.add_argument("--output", type=Path, metavar="STEM", help="default: figures/figure<name>_<scale>")
    return parser.parse_args(arguments)


def _use_glyph_weights(args: argparse.Namespace) -> None:
    """`digits` starts from our own weights where they fit: MobileNetV2 at width 0.35."""
    embedded = args.dataset_name == "digits" and args.model_name in (None, "mobilenetv2") and args.alpha in (None, 0.35)
    if args.weights is None and embedded:
        args.weights = str(GLYPH_WEIGHTS)


def model_label(args: argparse.Namespace) -> str:
    """A short name of the network that is fit for a folder's."""
    if is_own_model(args.model_name):
        file, _, function = args.model_name.partition(".py:")
        return "-".join(filter(None, (Path(file).stem, function)))
    wide = args.model_name not in WIDTHS or args.alpha == 1
    return args.model_name if wide else f"{args.model_name}-{args.alpha:g}"


def profiler_command(args: argparse.Namespace) -> str:
    """The command that makes the timing table these options need."""
    return shlex.join(["python", "profiler.py", *profiler_flags(args)])


def profiler_flags(args: argparse.Namespace) -> list[str]:
    """What profiler.py must be given to make the timing table these options need."""
    parts = ["--model_name", args.model_name, "--dataset_name", args.dataset_name]
    if args.model_name in WIDTHS:
        parts += ["--alpha", f"{args.alpha:g}"]
    for name in ("input_size", "num_classes", "batch_size", "optimizer", "augment"):
        parts += [f"--{name}", str(getattr(args, name))]
    if args.mixed_precision:
        parts.append("--mixed_precision")
    for name in ("weights", "data_dir", "logdir"):
        if str(getattr(args, name, None)) not in ("None", "logs"):
            parts += [f"--{name}", str(getattr(args, name))]
    return parts
