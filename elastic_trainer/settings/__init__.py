"""The settings of a run: one dataclass, whose fields are the flags of main.py and profiler.py (no TensorFlow here).

The defaults of `Settings` are the paper's. `PRESETS` has other complete sets for photos and for the demo. A value of
None is chosen by the run: `commands` chooses what follows from other flags, `resolve` what is measured. config.json is
the record of the settings that a run had. The last fields are of the presets alone, no flags.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from elastic_trainer.settings.flags import (
    ABOVE_0,
    Flag,
    count,
    duration,
    existing_file,
    flag,
    flags_of,
    folder,
    memory_size,
    number,
    one_of,
    parse_bool,
    rate,
    share,
    value_text,
    whole_number,
)
from elastic_trainer.settings.network_names import SMALL_WIDTH, known_network, known_weights

OPTIMIZERS = "sgd", "adam"
FEATURE_CACHES = ("float32", "off")
AUGMENTATIONS = ("none", "flip", "flip_crop", "flip_rotate")  # flip: the paper; flip_rotate: its published scripts
BEST_MODEL, LAST_MODEL = "best.keras", "last.keras"  # in the folder of a run with --save_model
TRAINED_IMAGES = "trained_images.bin"  # in the folder of each run, see `datasets.image_data`
TABLE_RECORD = "profile.json"  # in the folder of a timing table

# Sections of docs/flags.md and --help. Flags of the first two belong to profiler.py, those of the second to it alone.
NETWORK, PROFILE = "Network and data", "Operation times"
TRAINED, BUDGET = "What is trained", "Time budget and selection"
DATA, RESUMING, OUTPUT = "Data", "Resuming", "Output"

# What the photos' preset changes in how steps train, besides their number and size (docs/results.md compares both).
RATE, RATE_BATCH = 0.02, 32  # highest learning rate of sgd, at that many images a step
CLIPPING = 0.02


def rate_at(batch_size: int) -> float:
    """The learning rate of the photos' preset: `RATE`, in proportion for fewer images than `RATE_BATCH` (Goyal et al.,
    arXiv 1706.02677), the same for more."""
    return float(f"{RATE * min(batch_size, RATE_BATCH) / RATE_BATCH:.4g}")


# fmt: off
# Few lines per flag: default, section, type, word for its value in --help, and its help.

@dataclass(frozen=True)
class Settings:
    """All settings of a run. The defaults are those of the paper's evaluation.

    `deadline` is in seconds; `memory` is in MB; `interval` is in epochs. Fields that are None before
    `resolve` have the type that they have after it.

    Attributes:
        num_classes: outputs of the head; those of the data set in main.py.
        resume: continue the run of this name, if there is one.
        evaluate: the .keras file to test. `input_size` is None if neither the command line nor its run says it.
        gradient_clipping: bound of each gradient's norm but the head's, as a share of the norm of its weights (adaptive
            gradient clipping, with sgd); 0: no bound. See `engine.optimizers`.
        warmup: share of the steps in which the learning rate of sgd rises to its highest value.
        validation_share: validate after an epoch only while validation takes at most this share of training time, and
            after the last epoch; 1 validates after each.
        micro_batch: 0: a step takes the batch at once.
        starts_with_head: with `save_model`, the closed-form head is fitted first and is the first best model.
        average_weights: after the last step, the weights become their mean over the last part of the run, see
            `engine.weight_mean`.
        average_head: after the last step, average the head with the closed-form head of the trained network, see
            `TrainState.average_head`.
        has_fillers: tensors of negative importance train where the budget has room; never in the paper.
        checkpoint_minutes: between two checkpoints; 0: one after each step.
        from_epoch, from_step: what a finished run had done when it went on; its schedule starts there.
    """

    model_name: str = flag("resnet50", NETWORK, known_network, "NAME", (
        "`resnet50`, `vgg16`, `mobilenetv2`, `vit` (ViT-B/16), `efficientnetlite0`, any other name of "
        "`keras.applications`, or [your own network](your_data_and_networks.md#your-own-network): `FILE.keras` or "
        "`FILE.py:FUNCTION`. `photos` takes [what there is time for](presets.md#the-network)"),
        evaluate="run")
    input_size: int = flag(224, NETWORK, whole_number(1, 4096), "PIXELS", "height and width of the input in pixels",
        evaluate="run")
    num_classes: int | None = flag(None, PROFILE, whole_number(2, 100_000), "N", "outputs of the new head",
        "the data set's")
    batch_size: int = flag(4, NETWORK, whole_number(1, 65_536), "N", (
        "images per step. The preset `photos` takes 32, fewer where there are few images or little memory"),
        evaluate="run")
    weights: str = flag("imagenet", NETWORK, known_weights, "imagenet|none|PATH", (
        "initial weights, see [Weights](your_data_and_networks.md#weights). The glyph weights are the default for "
        "MobileNetV2 of width 0.35 "
        "on `digits`; `profiler.py` takes `none`, since times do not depend on them"), "`imagenet` or glyph weights")
    alpha: float = flag(1.0, NETWORK, number(0.01, 4), "WIDTH", "width of a MobileNet")
    optimizer: str = flag("sgd", NETWORK, one_of(OPTIMIZERS), "NAME", (
        "`sgd`: momentum 0.9, decoupled weight decay, cosine schedule to 0. `adam`: constant rate"),
        "`adam` for `vit`, else `sgd`")
    seed: int = flag(0, NETWORK, whole_number(0, 2**31 - 1), "N", (
        "seed of the weights, the order of the data, augmentation and dropout"))
    dataset_name: str = flag("caltech_birds2011", NETWORK, str, "NAME", "{names}", evaluate="run")
    data_dir: Path | None = flag(None, NETWORK, Path, "DIR", (
        "the folder of an [`image_folder`](your_data_and_networks.md#your-own-photos), or the folder in which "
        "tensorflow-datasets keeps its files"), is_free=True, evaluate="run")
    preset: str = flag("paper", NETWORK, str, "NAME", "[all defaults](presets.md): {names}",
        "`photos` for `image_folder`, `demo` for `digits`, else `paper`")
    logdir: Path = flag(Path("logs"), NETWORK, folder, "DIR", "folder of the runs and the timing tables",
        is_free=True, evaluate="given")

    seconds: float = flag(110.0, PROFILE, number(0, 86_400), "SECONDS", (
        "time for measuring steps; at least five rounds are measured"))
    from_trace: Path | None = flag(None, PROFILE, existing_file, "FILE", (
        "a `*.xplane.pb` file recorded on a board: [plan for that board](devices.md#plan-for-a-board-on-a-laptop) "
        "and measure nothing here"))

    train_type: str = flag("elastic_training", TRAINED, str, "SCHEME", "the scheme, see [Schemes](#schemes): {names}")
    trained_layers: int = flag(1, TRAINED, count, "N", (
        "for `last_layers_training`: number of layers, counted from the output, that are trained"))
    num_epochs: int = flag(12, TRAINED, whole_number(1, 1_000_000), "N", (
        "epochs. With `--deadline`, by default as many as [there is time for](time_budget.md#a-deadline)"))
    max_steps: int | None = flag(None, TRAINED, count, "N", "stop, and end the learning-rate schedule, after N steps")
    learning_rate: float = flag(1e-4, TRAINED, rate, "RATE", (
        "highest learning rate. The preset `photos` takes 0.02 for 32 images a step, in proportion for fewer"))
    weight_decay: float = flag(5e-4, TRAINED, number(0, 100), "RATE", "per unit of learning rate; `sgd` only")
    deterministic: bool = flag(False, TRAINED, parse_bool, "True|False", (
        "two runs with the same seed give the same result [bit for bit](runs.md#deterministic-runs). The budget is "
        "not [corrected](time_budget.md#how-the-budget-is-corrected) by the speed of the device"))

    rho: float = flag(0.5, BUDGET, share, "SHARE", (
        "step time of elastic training, as a share of a full step's. A single selection may take up to 0.03 more if "
        "earlier ones took less. With 1, everything trains"))
    deadline: float | None = flag(None, BUDGET, duration, "TIME", (
        "end the program in time, its export included: wall-clock time from its start, in seconds or as `90m` or "
        "`2.5h`. `--rho` still says how long a step may take"))
    interval: float = flag(3.0, BUDGET, number(ABOVE_0, 1e9), "EPOCHS", (
        "epochs between two selections; 0.5 selects twice per epoch"))
    importance_batches: int = flag(1, BUDGET, count, "N", (
        "batches on which importance is measured; with 2 or more, [an update is judged on other "
        "images](how_it_works.md#the-six-steps) than it was made from"))
    memory: float | None = flag(None, BUDGET, memory_size, "SIZE", (
        "[memory that the process may take](memory.md), TensorFlow included: `900M`, `1.5G`, or `80%` of what is "
        "available at the start. Elastic schemes select within it, beside `--rho`; others are refused "
        "if they take more"), "no limit", is_free=True)
    micro_batch: int = flag(0, BUDGET, count, "N", (
        "add gradients up over [parts of a batch](memory.md#parts-of-a-batch) of at most N images, which saves memory "
        "and takes time. The preset `photos` does so where memory is little; `--export board` takes parts of 8"),
        "the batch at once", is_free=True)
    plan: bool = flag(False, BUDGET, parse_bool, "True|False", (
        "do not train; print the settings, and what an epoch and the run [would take](memory.md#the-plan) in time and "
        "memory, at `--rho` and at others; for elastic schemes"), is_free=True)

    test_fraction: float | None = flag(None, DATA, number(ABOVE_0, 0.9), "SHARE", (
        "for an `image_folder` of class folders alone: about this share of the images is for testing"), evaluate="run")
    augment: str = flag("flip", DATA, one_of(AUGMENTATIONS), "KIND", (
        "[how training images vary](your_data_and_networks.md#how-images-vary): `none`, `flip`, `flip_crop` or "
        "`flip_rotate`"))
    feature_cache: str = flag("off", DATA, one_of(FEATURE_CACHES), "KIND", (
        "format in which [features](runs.md#features) of the frozen layers are cached where that saves time: "
        "`float32`, or `off`, as in the paper"))

    resume: bool = flag(False, RESUMING, Path, "DIR", (
        "`--resume DIR` [continues](runs.md#resume) the run in DIR, with the settings in its config.json. `--resume` "
        "alone continues the run that the other flags name, and starts it if it does not exist"), is_free=True)

    run_name: str = flag("", OUTPUT, str, "NAME", (
        "folder under `--logdir`. A name that exists gets the suffix `-2`, `-3`, …"), "made from the settings",
        is_free=True)
    save_model: bool = flag(False, OUTPUT, parse_bool, "True|False", (
        "save `best.keras` and `last.keras` in the run's folder. With the preset `photos` this is the default, except "
        "for your own network"), is_free=True)
    export: str | None = flag(None, OUTPUT, str, "FORMAT", (
        "`tflite`: write the best model for TensorFlow Lite and [check "
        "it](evaluate_and_export.md#export-to-tensorflow-lite); also saves `best.keras`. `tflite_int8`: also one in "
        "integers alone. `board`: do not train; write the folder from which [a board trains](small_boards.md) in "
        "LiteRT, or in the TensorFlow that it has, from 2.6 on"),
        is_free=True, evaluate="given")
    evaluate: Path | None = flag(None, OUTPUT, Path, "PATH", (
        "do not train; [test](evaluate_and_export.md#evaluate-a-model) the best model in this run's folder, or this "
        "`.keras` file, and report each class"), is_free=True, evaluate="given")

    gradient_clipping: float = 0.0
    warmup: float = 0.0
    validation_share: float = 1.0
    starts_with_head: bool = False
    average_weights: bool = False
    average_head: bool = False
    has_fillers: bool = False
    checkpoint_minutes: float = 10.0
    from_epoch: int = 0
    from_step: int = 0

    @property
    def folder(self) -> Path:
        """The folder of this name; a new run appends -2, -3, … if it exists (see `runs.folder`)."""
        return self.logdir / self.run_name

    @property
    def clips_gradients(self) -> bool:
        """Whether gradients are bounded, which takes time in each step."""
        return self.gradient_clipping > 0

    def to_record(self) -> dict[str, Any]:
        """The settings as config.json has them."""
        plain = (int, float, str, type(None))
        return {name: value if isinstance(value, plain) else str(value) for name, value in asdict(self).items()}


# fmt: on
# Complete: what one does not name is the paper's. `commands` takes `paper` for trainings that have no other (Adam and
# PruneTrain), see `TRAINING`.
PRESETS: dict[str, Settings] = {
    "paper": Settings(),
    "photos": Settings(
        preset="photos",
        model_name=None,  # type: ignore[arg-type]  # the best that there is time and memory for
        alpha=SMALL_WIDTH,
        input_size=None,  # type: ignore[arg-type]  # with the network; 160 where its name is given
        batch_size=None,  # type: ignore[arg-type]  # chosen by how many images there are, and the memory
        train_type=None,  # type: ignore[arg-type]  # the upper part; by importance for random weights
        num_epochs=8,
        interval=8.0,
        rho=None,  # type: ignore[arg-type]  # 0.5, or what training the head alone takes
        learning_rate=None,  # type: ignore[arg-type]  # by the batch size, see `rate_at`
        micro_batch=None,  # type: ignore[arg-type]  # the batch at once, or parts where memory is little
        augment=None,  # type: ignore[arg-type]  # mirrored; with a deadline cropped, too
        feature_cache="float32",
        save_model=None,  # type: ignore[arg-type]  # unless Keras may be unable to save the network
        gradient_clipping=CLIPPING,
        warmup=0.1,
        validation_share=0.1,
        starts_with_head=True,
        average_weights=True,
        average_head=True,
        has_fillers=True,
    ),
    "demo": Settings(
        preset="demo",
        model_name="mobilenetv2",
        alpha=0.35,
        input_size=64,
        batch_size=16,
        num_epochs=24,
        interval=12.0,
        rho=0.45,
        learning_rate=2e-3,
        augment="none",  # a mirrored digit is no digit
        feature_cache="float32",
    ),
}
# Of the photos' preset: what Adam and PruneTrain do not have.
TRAINING = (
    *("augment", "learning_rate", "gradient_clipping", "warmup"),
    *("validation_share", "average_weights", "average_head", "has_fillers"),
)
ALL_FLAGS: dict[str, Flag] = flags_of(Settings)
MAIN_FLAGS = {name: one for name, one in ALL_FLAGS.items() if one.section != PROFILE}
PROFILER_FLAGS = {name: one for name, one in ALL_FLAGS.items() if one.section in (NETWORK, PROFILE)}


def preset_table(runs: Mapping[str, Settings]) -> list[list[str]]:
    """The settings, by name, in which the presets differ, of these runs and presets: rows of text, the head first."""
    names = [name for name in vars(Settings()) if len({repr(getattr(one, name)) for one in PRESETS.values()}) > 1]
    chosen = "the run chooses"
    rows = [[name, *(value_text(getattr(one, name)) or chosen for one in runs.values())] for name in names]
    return [["setting", *runs], *([cell.strip("`") for cell in row] for row in rows if row[0] != "preset")]
