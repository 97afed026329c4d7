"""The settings of a run as typed values, one dataclass per subject (no TensorFlow here). Each field is a flag.

`flag` declares everything about it: default, help, section of docs/flags.md, type, and the runs that use it. Only the
command line (cli/) handles words; it turns them into these classes, and everything else takes typed values.

`PAPER` contains the settings of the paper's evaluation, which are the defaults. A data set may have others
(`registry.DATASETS`), and a recipe replaces some of both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elastic_trainer.options import (
    ABOVE_0,
    Flag,
    OneOf,
    Use,
    at_least_0,
    count,
    derived,
    duration,
    flag,
    flags_of,
    folder,
    memory_size,
    number,
    rate,
    share,
    whole_number,
)
from elastic_trainer.registry import DATASETS, EXPORTERS, IMPORTANCES, SCHEMES, Lazy, users
from elastic_trainer.registry import FLAGS as EXTENSION_FLAGS

TIMINGS = ("trace", "flops")
OPTIMIZERS = "sgd", "adam"
FEATURE_CACHES = ("float32", "float16", "off")
AUGMENTATIONS = ("none", "flip", "flip_rotate")  # flip: the paper; flip_rotate: its published scripts
CLIPPING = 0.02  # the robust recipe's bound of gradients
BEST_MODEL, LAST_MODEL = "best.keras", "last.keras"  # in the folder of a run with --save_model
TABLE_RECORD = "profile.json"  # in the folder of a timing table
TRAINED_IMAGES = "trained_images.bin"  # in the folder of each run, see `datasets.image_data`

PAPER: dict[str, Any] = {
    "model_name": "resnet50",
    "input_size": 224,
    "batch_size": 4,
    "alpha": 1.0,
    "weights": "imagenet",
    "augment": "flip",
    "learning_rate": 1e-4,
    "weight_decay": 5e-4,
    "num_epochs": 12,
    "interval": 3,
    "rho": 0.5,
    "feature_cache": "off",
    "save_model": False,
    "recipe": "paper",
}
RECIPES: dict[str, dict[str, Any]] = {  # docs/results.md compares them
    "paper": {
        "train_type": "elastic_training",
        "gradient_clipping": 0.0,
        "warmup": 0.0,
        "validation_share": 1.0,
        "average_head": False,
        "has_fillers": False,
    },
    "robust": {
        "train_type": "elastic_training_upper_part",
        "gradient_clipping": CLIPPING,
        "warmup": 0.1,
        "validation_share": 0.1,
        "average_head": True,
        "has_fillers": True,
        "learning_rate": 0.02,  # at `RATE_BATCH` images a step, see `rate_at`
    },
}
RATE_BATCH = 32


def rate_at(rate: float, batch_size: int) -> float:
    """The robust recipe's learning rate, given that for `RATE_BATCH`: in proportion for smaller batches (Goyal et al.,
    arXiv 1706.02677), the same for larger ones."""
    return float(f"{rate * min(batch_size, RATE_BATCH) / RATE_BATCH:.4g}")


def defaults_of(dataset_name: str) -> dict[str, Any]:
    """The defaults for a data set. Raises `ValueError` if its entry has a name that `PAPER` lacks."""
    own = DATASETS[dataset_name].defaults
    check_names(own, PAPER)
    return {**PAPER, **own}


def check_names(table: Any, known: Any) -> None:
    """Raise `ValueError` for a name in a table of defaults that is not in `known`."""
    unknown = [name for name in table if name not in known]
    if unknown:
        raise ValueError(f"a table of defaults has '{unknown[0]}', which is not one of {', '.join(known)}")


DIGITS, PHOTOS = defaults_of("digits"), defaults_of("image_folder")

# Sections of docs/flags.md and --help. Flags of the first belong to profiler.py and main.py.
NETWORK, PROFILE = "Network and data", "Operation times"
TRAINED, BUDGET = "What is trained", "Time budget and selection"
DATA, RESUMING, OUTPUT = "Data", "Resuming", "Output"

ELASTIC = Use("elastic schemes", lambda run: SCHEMES[run["train_type"]].is_elastic)


def _of_most_schemes(flag: str) -> Use:
    others = ", ".join(name for name in SCHEMES if flag in SCHEMES[name].ignores)
    return Use(f"schemes other than {others}", lambda run: flag not in SCHEMES[run["train_type"]].ignores)


BY_STEPS, WITH_RECIPE = _of_most_schemes("num_epochs"), _of_most_schemes("recipe")
BY_IMPORTANCE = Use("schemes that select by importance", lambda run: SCHEMES[run["train_type"]].importance is not None)
ON_IMAGES = Use(
    "schemes that measure importance on images",
    lambda run: IMPORTANCES[SCHEMES[run["train_type"]].importance or ""].reads_images,
)
LAST_LAYERS = Use(
    f"--train_type {users(SCHEMES, 'trained_layers')}", lambda run: "trained_layers" in SCHEMES[run["train_type"]].uses
)
WITH_SGD = Use("--optimizer sgd", lambda run: run["optimizer"] == "sgd")
ROBUST_WITH_SGD = Use("--optimizer sgd", lambda run: run["recipe"] == "paper" or run["optimizer"] == "sgd")
NAMED_HERE = Use("runs that --resume DIR does not name", lambda run: not isinstance(run["resume"], Path))


# fmt: off
# Few lines per flag: default, section, type, word for its value in --help, the runs that use it, and its help.

@dataclass(frozen=True)
class NetworkSettings:
    """Which network is built, and what its training step computes.

    Attributes:
        num_classes: None until the data set is known.
        alpha: 1 for networks other than MobileNets.
        clips_gradients: whether gradients are bounded, see `training.optimizers`.
    """

    model_name: str = flag(PAPER["model_name"], NETWORK, Lazy("elastic_trainer.networks.names:known_network"), "NAME",
        evaluate="run", help=(
        "`resnet50`, `vgg16`, `mobilenetv2`, `vit` (ViT-B/16), `efficientnetlite0` (its weights are [a "
        "package](your_data_and_networks.md#your-own-photos)), any other name of `keras.applications` such as "
        "`efficientnetb0` or `convnexttiny`, or [your own network](your_data_and_networks.md#your-own-network): "
        "`FILE.keras`, or `FILE.py:FUNCTION`, called with (height, width, 3) and the number of classes"))
    input_size: int = flag(PAPER["input_size"], NETWORK, whole_number(1, 4096), "PIXELS", evaluate="run", help=(
        "height and width of the input in pixels"))
    num_classes: int | None = flag(
        None, NETWORK, whole_number(2, 100_000), "N", words="the data set's", evaluate="run", help=(
        "outputs of the new head"))
    batch_size: int = flag(PAPER["batch_size"], NETWORK, whole_number(1, 65_536), "N", evaluate="run", help=(
        "images per step. The default for `image_folder` is smaller where there are few images or little memory"))
    weights: str = flag(
        PAPER["weights"], NETWORK, Lazy("elastic_trainer.networks.names:known_weights"), "imagenet|none|PATH",
        words="glyph weights or `imagenet`", help=(
        "initial weights, see [Weights](#weights). The glyph weights are the default for MobileNetV2 of width 0.35 "
        "on `digits`; `profiler.py` takes `none`, since times do not depend on them"))
    alpha: float = flag(PAPER["alpha"], NETWORK, number(0.01, 4), "WIDTH", help="width of a MobileNet")
    optimizer: str = flag("sgd", NETWORK, OneOf(OPTIMIZERS), "NAME", words="`adam` for `vit`, else `sgd`", help=(
        "{names}. `sgd`: momentum 0.9, decoupled weight decay, cosine schedule to 0. `adam`: constant rate"))
    clips_gradients: bool = derived(False, lambda run: bool(run["gradient_clipping"]))
    seed: int = flag(0, NETWORK, whole_number(0, 2**31 - 1), "N", help=(
        "seed of the weights, the order of the data, augmentation and dropout"))

    def with_classes(self, count: int) -> NetworkSettings:
        """For `count` classes, unless the number was given."""
        return self if self.num_classes else replace(self, num_classes=count)


@dataclass(frozen=True)
class DataSettings:
    """Which images are read, where they are kept, and how they are varied in training.

    Attributes:
        cache_dir: folder for decoded images that do not fit into memory; None: keep all in memory.
        augment: see `datasets.augmentation`.
    """

    dataset_name: str = flag("caltech_birds2011", NETWORK, OneOf(DATASETS), "NAME", evaluate="run", help="{names}")
    data_dir: Path | None = flag(None, NETWORK, Path, "DIR", is_free=True, evaluate="run", help=(
        "the folder of an [`image_folder`](your_data_and_networks.md#your-own-photos), or the folder in which "
        "tensorflow-datasets keeps its files"))
    test_fraction: float | None = flag(None, DATA, number(ABOVE_0, 0.9), "SHARE", evaluate="run", help=(
        "for an `image_folder` of class folders alone: about this share of the images is for testing"))
    cache_dir: Path | None = derived(None, lambda run: run["logdir"] / "images")
    augment: str = flag(DIGITS["augment"], DATA, OneOf(AUGMENTATIONS), "KIND", help=(
        "[how training images vary](#augmentation): {names}"))


@dataclass(frozen=True)
class Settings:
    """Hyper-parameters of training; defaults are those of the paper's evaluation, except that features are cached.

    `deadline` is in seconds and replaces `rho`; `memory` is in MB; `interval` is in epochs. `feature_cache`: see
    `training.features`; `gradient_clipping`: see `training.optimizers`.

    Attributes:
        correct_budget: measure the speed of the device before each selection, and correct the budget by it; a single
            selection of the upper part measures nothing.
        starts_with_head: with `save_model`, the closed-form head is fitted first and is the first best model.
        warmup: share of the steps in which the learning rate of `sgd` rises to its highest value.
        validation_share: validate after an epoch only while validation takes at most this share of training time, and
            after the last epoch; 1 validates after each.
        average_head: after the last step, average the head with the closed-form head of the trained network, see
            `TrainState.average_head`.
        has_fillers: tensors of negative importance train where the budget has room; never in the paper.
    """

    trained_layers: int = flag(1, TRAINED, count, "N", used_by=(LAST_LAYERS,), help=(
        "for `last_layers_training`: number of layers, counted from the output, that are trained"))
    optimizer: str = NetworkSettings.optimizer
    num_epochs: int = flag(PAPER["num_epochs"], TRAINED, whole_number(1, 1_000_000), "N", used_by=(BY_STEPS,), help=(
        "epochs. With `--deadline`, the default [depends on it](time_budget.md#a-deadline)"))
    max_steps: int | None = flag(None, TRAINED, count, "N", used_by=(BY_STEPS,), help=(
        "stop, and end the learning-rate schedule, after N steps"))
    learning_rate: float = flag(PAPER["learning_rate"], TRAINED, rate, "RATE", used_by=(BY_STEPS,), help=(
        "highest learning rate; the default of `--recipe robust` [depends on the batch size](#recipes)"))
    weight_decay: float = flag(PAPER["weight_decay"], TRAINED, number(0, 100), "RATE", used_by=(WITH_SGD,),
        help="per unit of learning rate; `sgd` only")
    gradient_clipping: float | None = flag(None, NETWORK, at_least_0, "SHARE",
        of=lambda run: run["gradient_clipping"] or None, words="by `--recipe`", help=(
        "with `sgd`: limit the norm of each gradient, except the head's, to this share of the norm of its weights "
        "(adaptive gradient clipping); 0 means no limit"))
    rho: float = flag(PAPER["rho"], BUDGET, share, "SHARE", used_by=(ELASTIC,), help=(
        "step time of elastic training, as a share of a full step's. A single selection may take up to 0.03 more if "
        "earlier ones took less. With 1, everything trains"))
    deadline: float | None = flag(None, BUDGET, duration, "TIME", help=(
        "instead of `--rho`: wall-clock time from the start of the program to its export, in seconds or as `90m` or "
        "`2.5h`"))
    memory: float | None = flag(None, BUDGET, memory_size, "SIZE", words="no limit", is_free=True, help=(
        "[memory that the process may take](memory.md), TensorFlow included: `900M`, `1.5G`, or `80%` of what is "
        "available at the start. Elastic schemes select within it, beside `--rho` or `--deadline`; others are refused "
        "if they take more"))
    micro_batch: int | None = flag(
        None, BUDGET, count, "N", words="by `--recipe`", used_by=(BY_STEPS,), is_free=True, help=(
        "add gradients up over [parts of a batch](memory.md#parts-of-a-batch) of at most N images, which saves memory "
        "and takes time. `paper` takes a batch at once, `robust` in parts where memory is little; with "
        "`--export train_tflite` the default is 8"))
    interval: float = flag(PAPER["interval"], BUDGET, number(ABOVE_0, 1e9), "EPOCHS", used_by=(ELASTIC,), help=(
        "epochs between two selections; 0.5 selects twice per epoch"))
    correct_budget: bool = derived(True, lambda run: not run["deterministic"])
    time_resolution: int | None = flag(
        None, BUDGET, whole_number(10, 10_000_000), "STEPS", words="automatic", used_by=(ELASTIC, BY_IMPORTANCE), help=(
        "number of time steps in which the solver counts the budget (the paper's T_q)"))
    importance_batches: int = flag(1, BUDGET, count, "N", used_by=(ELASTIC, BY_IMPORTANCE, ON_IMAGES), help=(
        "batches on which importance is measured; with 2 or more, [an update is judged on other "
        "images](how_it_works.md#the-six-steps) than it was made from"))
    feature_cache: str = flag(FEATURE_CACHES[0], DATA, OneOf(FEATURE_CACHES), "KIND", help=(
        "format in which [features](runs.md#features) of the frozen layers are cached where that saves time: "
        "`float32`, `float16` (half the memory, rounded), or `off`, as in the paper"))
    checkpoint_minutes: float = flag(10.0, RESUMING, at_least_0, "MINUTES", is_free=True, help=(
        "minutes between two checkpoints; 0 writes one after every step"))
    save_model: bool = flag(
        PAPER["save_model"], OUTPUT, is_free=True, help=(
        "save `best.keras` and `last.keras` in the run's folder. The default for your own network is `False`"))
    starts_with_head: bool = derived(False, lambda run: run["recipe"] == "robust")
    warmup: float = 0.0
    validation_share: float = 1.0
    average_head: bool = False
    has_fillers: bool = False


@dataclass(frozen=True)
class RunSettings:
    """Which scheme runs, in which folder, how it starts, and what is done after training.

    Attributes:
        resume: continue the run of this name, if there is one.
        run_name: name of the folder, without the suffix -2, -3, … of runs with the same name.
    """

    logdir: Path = flag(
        Path("logs"), NETWORK, folder, "DIR", used_by=(NAMED_HERE,), is_free=True, evaluate="given", help=(
        "folder of the runs and the timing tables"))
    run_name: str = flag(
        "", OUTPUT, str, "NAME", words="made from the settings", used_by=(NAMED_HERE,), is_free=True, help=(
        "folder under `--logdir`. A name that exists gets the suffix `-2`, `-3`, …"))
    train_type: str = flag(RECIPES["paper"]["train_type"], TRAINED, OneOf(SCHEMES), "SCHEME", words="by `--recipe`",
        help="the scheme, see [Schemes](#schemes): {names}")
    recipe: str = flag(
        PAPER["recipe"], NETWORK, OneOf(RECIPES), "NAME", words="`robust` for `image_folder`, else `paper`",
        used_by=(WITH_RECIPE, ROBUST_WITH_SGD), help="{names}: what trains, and how, see [Recipes](#recipes)")
    save_txt: bool = flag(False, OUTPUT, is_free=True, help=(
        "of the paper's scripts: a line says where the text is, which is always written: metrics.csv and summary.json"))
    resume: bool = flag(False, RESUMING, Path, "DIR", is_free=True, help=(
        "`--resume DIR` continues the run in DIR, with the options it was started with. `--resume` alone continues "
        "the run that the other flags name, and starts it if it does not exist"))
    deterministic: bool = flag(False, TRAINED, help=(
        "two runs with the same seed give the same result [bit for bit](runs.md#deterministic-runs). The budget is "
        "not [corrected](time_budget.md#how-the-budget-is-corrected) by the speed of the device"))
    allow_stale_profile: bool = flag(False, BUDGET, used_by=(ELASTIC,), is_free=True, help=(
        "use a timing table that was made [on another machine, with other versions or before the network "
        "changed](runs.md#a-stale-timing-table), or that is "
        "[unreliable](time_budget.md#predicted-and-measured-step-time)"))
    plan: bool = flag(False, BUDGET, is_free=True, help=(
        "do not train; print what an epoch and the run [would take](memory.md#the-plan) in time and memory, at "
        "`--rho` and at others; for elastic schemes"))
    export: str | None = flag(None, OUTPUT, OneOf(EXPORTERS), "FORMAT", is_free=True, evaluate="given", help=(
        "`tflite`: write the best model for TensorFlow Lite and [check it](runs.md#export-to-tensorflow-lite); also "
        "saves `best.keras`. `train_tflite`: do not train; write the folder from which [a board "
        "trains](small_boards.md) without TensorFlow. `train_graph`: also in the TensorFlow that it has, from 2.6 on"))
    evaluate: Path | None = flag(None, OUTPUT, Path, "PATH", is_free=True, evaluate="given", help=(
        "do not train; [test](runs.md#evaluate-a-model) the best model in this run's folder, or this `.keras` file, "
        "and report each class"))

    @property
    def folder(self) -> Path:
        """The folder of this name; a new run appends -2, -3, … if it exists (see `runs.folder`)."""
        return self.logdir / self.run_name


@dataclass(frozen=True)
class ProfileSettings:
    """How a network is profiled."""

    timing: str = flag(TIMINGS[0], PROFILE, OneOf(TIMINGS), "SOURCE", help=(
        "source of the operation times. `trace` measures each; `flops` counts FLOPs and scales them to the measured "
        "full step"))
    seconds: float | None = flag(None, PROFILE, number(0, 86_400), "SECONDS", words="110", help=(
        "time for measuring steps; at least five rounds are measured"))
    from_trace: Path | None = flag(None, PROFILE, Path, "FILE", help=(
        "a `*.xplane.pb` file recorded on a board: [plan for that board](devices.md#plan-for-a-board-on-a-laptop) "
        "and measure nothing here"))


MAIN_FLAGS: dict[str, Flag] = {**flags_of(NetworkSettings, DataSettings, RunSettings, Settings), **EXTENSION_FLAGS}
PROFILER_FLAGS: dict[str, Flag] = {
    **{name: one for name, one in MAIN_FLAGS.items() if one.section == NETWORK},
    **flags_of(ProfileSettings),
}
check_names(PAPER, MAIN_FLAGS)
for _recipe in RECIPES.values():
    check_names(_recipe, {**MAIN_FLAGS, **vars(Settings())})
