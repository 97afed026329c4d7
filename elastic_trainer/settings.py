"""Hyper-parameters of a run."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_trainer.cli.options import PAPER


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
