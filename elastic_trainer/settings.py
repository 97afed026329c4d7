"""Hyper-parameters of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ELASTIC_TYPES = ("elastic_training", "elastic_training_weight_magnitude", "elastic_training_grad_magnitude")
FIXED_TYPES = ("full_training", "traditional_tl_training", "bn_plus_bias_training", "last_layers_training")
TRAIN_TYPES = (*FIXED_TYPES, *ELASTIC_TYPES, "prunetrain")
OPTIMIZERS = ("sgd", "adam")
TIMINGS = ("trace", "flops")
EXPORTS = ("tflite",)
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
}
DIGITS: dict[str, Any] = {
    **PAPER,
    "model_name": "mobilenetv2",
    "input_size": 64,
    "batch_size": 16,
    "alpha": 0.35,
    "augment": "none",  # a mirrored digit is no digit
    "learning_rate": 2e-3,
    "num_epochs": 24,
    "interval": 6,
}


@dataclass(frozen=True)
class Settings:
    """Hyper-parameters of a run; defaults are the paper's (section 6).

    `deadline` is in seconds and replaces `rho`; `interval` is in epochs, fractions allowed; a checkpoint is written
    every `checkpoint_steps` steps, if given, and when the last one is `checkpoint_minutes` old.
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
