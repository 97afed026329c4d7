"""The settings of a run as typed values, their defaults, and the names of the schemes (no TensorFlow here).

Three sets of defaults. `PAPER` holds the settings of the paper's experiments (section 6). `DIGITS` holds those of the
`digits` data set, which needs no download and trains in a minute on two cores. `PHOTOS` holds those of an image folder.
What a recipe sets replaces them. The command line (cli/) turns its words
into these classes once; everything else takes values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

FIXED_TYPES = ("full_training", "traditional_tl_training", "bn_plus_bias_training", "last_layers_training")
ELASTIC_TYPES = (
    "elastic_training",
    "elastic_training_weight_magnitude",
    "elastic_training_grad_magnitude",
    "elastic_training_random",
    "elastic_training_upper_part",
)
TRAIN_TYPES = (*FIXED_TYPES, *ELASTIC_TYPES, "prunetrain")
OPTIMIZERS = {"sgd": 1, "adam": 2}  # by name: variables that each keeps of the size of every trained one
TIMINGS = ("trace", "flops")
EXPORTS = ("tflite",)
FEATURE_CACHES = ("float32", "float16", "off")
CLIPPING = 0.02  # of gradients, where they are clipped and nothing else was asked for
RECIPES: dict[str, dict[str, Any]] = {  # docs/results.md says what they reach
    "paper": {"train_type": "elastic_training", "gradient_clipping": 0.0, "warmup": 0.0},
    "robust": {
        "train_type": "elastic_training_upper_part",
        "gradient_clipping": CLIPPING,
        "warmup": 0.1,
        "learning_rate": 3e-3,
        "elastic_learning_rate": 5e-3,  # of elastic schemes
    },
}
BEST_MODEL, LAST_MODEL = "best.keras", "last.keras"  # in the folder of a run that keeps its models

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
    "recipe": "paper",
}
PHOTOS: dict[str, Any] = {**PAPER, "recipe": "robust"}
DIGITS: dict[str, Any] = {
    **PAPER,
    "model_name": "mobilenetv2",
    "input_size": 64,
    "batch_size": 16,
    "alpha": 0.35,
    "augment": "none",  # a mirrored digit is no digit
    "learning_rate": 2e-3,
    "num_epochs": 24,
    "interval": 12,
    "rho": 0.45,
}


def defaults_of(dataset_name: str) -> dict[str, Any]:
    """The defaults for a data set: `DIGITS`, `PHOTOS` or `PAPER`."""
    return {"digits": DIGITS, "image_folder": PHOTOS}.get(dataset_name, PAPER)


def is_elastic(train_type: str) -> bool:
    """Whether a scheme selects tensors within a time budget."""
    return train_type in ELASTIC_TYPES


def measures_importance(train_type: str) -> bool:
    """Whether a scheme selects tensors by their importance."""
    return is_elastic(train_type) and train_type != "elastic_training_upper_part"


@dataclass(frozen=True)
class NetworkSettings:
    """Which network is built, and what its training step computes.

    Attributes:
        num_classes: outputs of the network; None until the data set is known.
        alpha: width of a MobileNet; 1 for the others.
        weights: imagenet, none, or a path.
        mixed_precision: compute in half precision.
        clips_gradients: bound each update, see `training.optimizers`.
        seed: of new weights, dropout, augmentation and the order of the images.
    """

    model_name: str = PAPER["model_name"]
    input_size: int = PAPER["input_size"]
    num_classes: int | None = None
    batch_size: int = PAPER["batch_size"]
    weights: str = PAPER["weights"]
    alpha: float = PAPER["alpha"]
    optimizer: str = "sgd"
    mixed_precision: bool = False
    clips_gradients: bool = False
    seed: int = 0

    def with_classes(self, count: int) -> NetworkSettings:
        """The same for `count` classes, if the number was left open."""
        return self if self.num_classes else replace(self, num_classes=count)


@dataclass(frozen=True)
class DataSettings:
    """Which images are read, where they are kept, and how they are varied in training.

    Attributes:
        data_dir: folder of the data set, if it needs one.
        test_fraction, skip_broken: of image_folder, see `data.load`.
        image_memory: MB that decoded images may take in memory; None: a quarter of what is available.
        cache_dir: folder for decoded images that do not fit into memory; None: always in memory.
        augment, cached_views: kind and number of views of training images, see `datasets.augmentation`.
    """

    dataset_name: str = "digits"
    data_dir: Path | None = None
    test_fraction: float | None = None
    skip_broken: bool = False
    image_memory: float | None = None
    cache_dir: Path | None = None
    augment: str = DIGITS["augment"]
    cached_views: int | None = None


@dataclass(frozen=True)
class Settings:
    """Hyper-parameters of training; defaults are the paper's (section 6).

    `deadline` is in seconds and replaces `rho` (elastic schemes only); `interval` is in epochs, fractions allowed; a
    checkpoint is written every `checkpoint_steps` steps, if given, and when the last one is `checkpoint_minutes` old.
    `feature_cache` is one of FEATURE_CACHES, see `training.features`. `head_epochs` come before `num_epochs`, and train
    the head alone from `head_learning_rate` on. `gradient_clipping` bounds updates, and the rate rises
    over the share `warmup` of the steps, see `training.optimizers`.
    """

    optimizer: str = "sgd"
    learning_rate: float = PAPER["learning_rate"]
    weight_decay: float = PAPER["weight_decay"]
    num_epochs: int = PAPER["num_epochs"]
    max_steps: int | None = None
    interval: float = PAPER["interval"]
    importance_batches: int = 1
    rho: float = PAPER["rho"]
    trained_layers: int = 1
    deadline: float | None = None
    correct_budget: bool = True
    time_resolution: int | None = None
    save_model: bool = False
    prune_interval: int = 2
    prune_ratio: float = 0.25
    prune_threshold: float = 0.7
    checkpoint_steps: int | None = None
    checkpoint_minutes: float = 10.0
    feature_cache: str = "float32"
    head_epochs: int = 0
    head_learning_rate: float = 1e-2
    gradient_clipping: float | None = None
    warmup: float = 0.0


@dataclass(frozen=True)
class RunSettings:
    """Where a run is kept, how it is started, and what is done after training.

    Attributes:
        resume: continue the run of this name, if there is one.
        overwrite: replace the run of this name.
        deterministic: use TensorFlow's deterministic operations.
        allow_stale_profile: accept a timing table of another machine or TensorFlow.
        save_txt: write hours and best accuracy as the paper's scripts do.
        export: format to export the best model to, or None.
        power_csv: record of an external power meter, or None.
    """

    logdir: Path
    run_name: str
    resume: bool = False
    overwrite: bool = False
    deterministic: bool = False
    allow_stale_profile: bool = False
    save_txt: bool = False
    export: str | None = None
    power_csv: Path | None = None

    @property
    def folder(self) -> Path:
        """The folder that the name asks for; a new run of a name that exists gets -2, -3, … (`runs.folder`)."""
        return self.logdir / self.run_name
