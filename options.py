"""Every command-line option, declared once, with its range and its default (no TensorFlow here: mistakes answer fast).

Two sets of defaults. `PAPER` holds the settings of the paper's experiments (section 6). `EMBEDDED` holds those of the
`digits` data set, which needs no download and trains in a minute on two cores. An option that is not given takes the
value of its data set's row.
"""

from __future__ import annotations

import argparse
import difflib
import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from utils import UserError

MODEL_NAMES = ("resnet50", "vgg16", "mobilenetv2", "vit")
DATASET_NAMES = ("caltech_birds2011", "oxford_iiit_pet", "stanford_dogs", "digits", "image_folder")
TRAIN_TYPES = ("full_training", "traditional_tl_training", "bn_plus_bias_training", "elastic_training")
AUGMENTATIONS = ("none", "flip", "flip_rotation")
OPTIMIZERS = ("sgd", "adam")
TIMINGS = ("trace", "flops")

GLYPH_WEIGHTS = Path(__file__).resolve().parent / "weights" / "mobilenetv2_0.35_glyphs.weights.h5"

PAPER: dict[str, Any] = {
    "model_name": "resnet50",
    "input_size": 224,
    "batch_size": 4,
    "alpha": 1.0,
    "weights": "imagenet",
    "augmentation": "flip",
    "learning_rate": 1e-4,
    "weight_decay": 5e-4,
    "num_epochs": 12,
    "interval": 3,
    "rho": 0.5,
}
EMBEDDED: dict[str, Any] = {
    **PAPER,
    "model_name": "mobilenetv2",
    "input_size": 64,
    "batch_size": 16,
    "alpha": 0.35,
    "augmentation": "none",  # a mirrored digit is no digit
    "learning_rate": 2e-3,
    "num_epochs": 24,
    "interval": 6,
}


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message.replace("argument ", "", 1))


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


_positive_int = _number(int, 1, 10**9, "a whole number of at least 1")
_natural_int = _number(int, 0, 2**31 - 1, "a whole number of at least 0")
_positive = _number(float, 1e-12, 1e12, "a number above 0")
_natural = _number(float, 0, 1e12, "a number of at least 0")
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
        near = difflib.get_close_matches(text, names, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise argparse.ArgumentTypeError(f"'{text}' is not one of {', '.join(names)}{hint}")

    return parse


def _network(text: str) -> str:
    """A network we know, a .keras file, or file.py:function; the file must be there."""
    file, colon, function = text.rpartition(":")
    if colon and file.endswith(".py"):
        if not function.isidentifier():
            raise argparse.ArgumentTypeError(f"'{text}': '{function}' is no name of a function; give file.py:function")
    elif text.endswith(".keras"):
        file = text
    elif text.endswith(".py"):
        raise argparse.ArgumentTypeError(f"'{text}': name the function that makes the model, as {text}:function")
    else:
        return _one_of((*MODEL_NAMES, "FILE.keras", "FILE.py:FUNCTION"))(text)
    if not Path(file).is_file():
        raise argparse.ArgumentTypeError(f"there is no file '{file}'")
    return os.path.normpath(text)


def _truth(text: str) -> bool:
    """The paper's scripts pass True and False as words."""
    if text.lower() not in ("true", "false", "1", "0"):
        raise argparse.ArgumentTypeError(f"must be True or False, not '{text}'")
    return text.lower() in ("true", "1")


def _add_network_options(parser: argparse.ArgumentParser) -> None:
    """What decides which network is built and how its step is timed: the same for profiler.py and main.py."""
    group = parser.add_argument_group("network and data")
    group.add_argument(
        "--model_name",
        type=_network,
        metavar="NAME",
        help=", ".join(MODEL_NAMES)
        + ", or your own: FILE.keras, or FILE.py:FUNCTION, called with (height, width, 3) and the number of classes",
    )
    group.add_argument(
        "--dataset_name", type=_one_of(DATASET_NAMES), metavar="NAME", default="digits", help=", ".join(DATASET_NAMES)
    )
    group.add_argument("--input_size", type=_positive_int, metavar="PIXELS", help="height and width of the input")
    group.add_argument("--batch_size", type=_positive_int, metavar="N")
    group.add_argument("--num_classes", type=_positive_int, metavar="N", help="default: the data set's own")
    group.add_argument("--weights", metavar="imagenet|none|PATH", help="where the backbone starts from")
    group.add_argument("--alpha", type=_positive, metavar="WIDTH", help="width of MobileNetV2")
    group.add_argument("--augmentation", type=_one_of(AUGMENTATIONS), metavar="KIND", help=", ".join(AUGMENTATIONS))
    group.add_argument(
        "--optimizer",
        type=_one_of(OPTIMIZERS),
        metavar="NAME",
        help="sgd (momentum 0.9, decoupled weight decay, cosine schedule) or adam (constant rate); "
        "default: adam for vit, sgd for the others",
    )
    group.add_argument("--seed", type=_natural_int, default=0, help="default: %(default)s")
    group.add_argument("--data_dir", type=Path, metavar="DIR", help="folder of the data set")
    group.add_argument("--logdir", type=Path, default=Path("logs"), metavar="DIR", help="default: %(default)s")


def _add_training_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument(
        "--train_type",
        type=_one_of(TRAIN_TYPES),
        default="elastic_training",
        metavar="SCHEME",
        help=", ".join(TRAIN_TYPES) + " (default: %(default)s)",
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
        default=True,
        metavar="True|False",
        help="measure at each selection how fast the device is now, and correct the budget (default: %(default)s)",
    )
    group.add_argument(
        "--time_resolution",
        type=_number(int, 10, 10**7, "a whole number from 10 to 10,000,000"),
        metavar="STEPS",
        help="time steps the solver counts the budget in (T_q); default: rounding costs below 0.1 %% of it",
    )
    group.add_argument("--interval", type=_positive_int, metavar="EPOCHS", help="epochs between two selections")
    group.add_argument(
        "--prune_interval",
        type=_positive_int,
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
        type=_natural,
        default=0.7,
        metavar="SHARE",
        help="prunetrain: a channel is removed when each of its readers gets less than this share of what it got from "
        "a median channel at first (default: %(default)s)",
    )
    group.add_argument("--num_epochs", type=_positive_int, metavar="N")
    group.add_argument(
        "--max_steps", type=_positive_int, metavar="N", help="end after this many steps in all, schedule included"
    )
    group.add_argument("--learning_rate", type=_positive, metavar="RATE")
    group.add_argument("--weight_decay", type=_natural, metavar="RATE", help="decoupled; with sgd only")
    group = parser.add_argument_group("output")
    group.add_argument("--run_name", metavar="NAME", help="folder under --logdir; default: made from the settings")
    group.add_argument("--overwrite", action="store_true", help="replace the run of that name, do not number this one")
    for flag, text in (
        ("--save_model", "keep best.keras and last.keras in the run's folder"),
        ("--save_txt", "write training hours and best accuracy in per cent to <run_name>.txt, as the paper's scripts"),
    ):
        group.add_argument(flag, type=_truth, nargs="?", const=True, default=False, metavar="True|False", help=text)


def _filled_in(args: argparse.Namespace) -> argparse.Namespace:
    """Every option that was not given takes its data set's default."""
    alpha_given = args.alpha is not None
    if is_own_model(args.model_name):
        if args.weights is None:
            args.weights = "none"
        elif args.weights != "none" and (args.weights == "imagenet" or args.model_name.endswith(".keras")):
            raise UserError(f"--weights {args.weights}: {args.model_name} brings its own weights; leave it out")
    defaults = EMBEDDED if args.dataset_name == "digits" else PAPER
    for name, value in defaults.items():
        if getattr(args, name, 0) is None:
            setattr(args, name, value)
    if args.model_name != "mobilenetv2":
        if alpha_given:
            raise UserError(f"--alpha: {args.model_name} has one width only; leave it out")
        args.alpha = 1.0
    if args.optimizer is None:
        args.optimizer = "adam" if args.model_name == "vit" else "sgd"
    return args


def parse_main(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of main.py, complete. Raises `UserError` for a value out of range."""
    parser = _OneLineParser(prog="main.py", description="Train one network under one scheme.")
    _add_network_options(parser)
    _add_training_options(parser)
    args = parser.parse_args(arguments)
    elastic = args.train_type == "elastic_training"
    if args.deadline is not None and (args.rho is not None or not elastic):
        other = "--rho; give one of the two" if elastic else f"--train_type {args.train_type}, which has no time budget"
        raise UserError(f"--deadline: does not go with {other}")
    _use_glyph_weights(args)
    args = _filled_in(args)
    if args.run_name is None:
        budget = f"_rho{args.rho:g}" if args.deadline is None else f"_deadline{args.deadline:g}"
        args.run_name = f"{model_label(args)}_{args.dataset_name}_{args.train_type}{budget if elastic else ''}"
    if args.run_name in (".", "..") or Path(args.run_name).name != args.run_name:
        raise UserError(f"--run_name must be the plain name of a folder, not '{args.run_name}'")
    if args.run_name == "profiles":
        raise UserError("--run_name must not be 'profiles': the timing tables are kept under that name")
    return args


def parse_profiler(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of profiler.py, complete. Raises `UserError` for a value out of range."""
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
        "--from_trace",
        type=Path,
        metavar="FILE",
        help="a board's *.xplane.pb: plan for that board, measure nothing here",
    )
    args = parser.parse_args(arguments)
    if args.from_trace is not None:
        if args.timing != "trace":
            raise UserError(f"--timing {args.timing}: --from_trace takes the times of its file; leave one of them out")
        if not args.from_trace.is_file():
            raise UserError(f"--from_trace {args.from_trace}: no such file; give a *.xplane.pb that tf.profiler wrote")
        args.weights = args.weights or "none"  # times do not depend on them
    _use_glyph_weights(args)
    return _filled_in(args)


def parse_benchmark(prog: str, description: str | None, **more: dict[str, Any]) -> argparse.Namespace:
    """The options of a script that measures a network: those of profiler.py, `--quick`, `--output`, and `more`.

    Args:
        prog, description: for the help.
        more: further flags by name, with what `add_argument` takes.
    """
    parser = _OneLineParser(prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    _add_network_options(parser)
    parser.add_argument("--quick", action="store_true", help="a short try on fewer measurements")
    parser.add_argument("--output", type=Path, metavar="STEM", help="figure without its ending")
    for name, settings in more.items():
        parser.add_argument(f"--{name}", **settings)
    args = parser.parse_args()
    args.weights = args.weights or "none"  # time does not depend on them
    return _filled_in(args)


def _use_glyph_weights(args: argparse.Namespace) -> None:
    """`digits` starts from our own weights where they fit: MobileNetV2 at width 0.35."""
    embedded = args.dataset_name == "digits" and args.model_name in (None, "mobilenetv2") and args.alpha in (None, 0.35)
    if args.weights is None and embedded:
        args.weights = str(GLYPH_WEIGHTS)


def is_own_model(model_name: str | None) -> bool:
    """Whether `--model_name` names a file of the user's rather than a network we know."""
    return model_name is not None and (model_name.endswith(".keras") or ".py:" in model_name)


def model_label(args: argparse.Namespace) -> str:
    """A short name of the network that is fit for a folder's."""
    if is_own_model(args.model_name):
        file, _, function = args.model_name.partition(".py:")
        return "-".join(filter(None, (Path(file).stem, function)))
    wide = args.model_name != "mobilenetv2" or args.alpha == 1
    return args.model_name if wide else f"{args.model_name}-{args.alpha:g}"


def profiler_command(args: argparse.Namespace) -> str:
    """The command that makes the timing table these options need."""
    parts = ["python", "profiler.py", "--model_name", args.model_name, "--dataset_name", args.dataset_name]
    if args.model_name == "mobilenetv2":
        parts += ["--alpha", f"{args.alpha:g}"]
    for name in ("input_size", "num_classes", "batch_size", "optimizer", "augmentation"):
        parts += [f"--{name}", str(getattr(args, name))]
    for name in ("weights", "data_dir", "logdir"):
        if str(getattr(args, name, None)) not in ("None", "logs"):
            parts += [f"--{name}", str(getattr(args, name))]
    return shlex.join(parts)
