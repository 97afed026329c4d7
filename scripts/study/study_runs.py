"""A run of the study, and how many steps it may take.

Every run gets a time budget: a share of what full training takes for `EPOCHS` epochs. It trains as many steps as fit,
with a cosine schedule over them. What a step takes is read from the timing table, so lengths do not depend on what else
the machine does during a run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from elastic_trainer.registry import SCHEMES
from elastic_trainer.timing.table import TimingTable

EPOCHS = 12  # of full training, the paper's (section 6)
LOOP_MS = 1.0  # of a step beside its own time: images, records
SELECTION_SECONDS = 1.5
AVERAGING_SECONDS = 0.5  # of the head, beside the forward pass over all images
MAX_HEAD_EPOCHS = 40  # a head alone has long stopped to learn


@dataclass(frozen=True)
class StudyRun:
    """One run.

    Attributes:
        part: of the study.
        label: of the setting in tables; runs of one label differ in budget, rate and seed.
        data, split: see `study_data`; "digits" are those of main.py.
        train_type, rho: flags. An elastic run without rho gets its budget as a deadline, and chooses its epochs.
        rate: learning rate.
        budget: share of full training's time for `EPOCHS` epochs; in the part `one_command` of its wall time in all.
        batch_size: of the network's steps. In the parts `equal_time`, `one_command` and `memory`, a budget is
            a share of full training's time at `REFERENCE_BATCH`, in the others at this batch size.
        network: mobilenetv2, or a function of `study_networks`.
        more: further flags of main.py; with `num_epochs` the run has no budget.
    """

    part: str
    label: str
    data: str
    split: str
    train_type: str
    rate: float
    budget: float
    seed: int = 0
    rho: float | None = None
    batch_size: int = 4
    network: str = "mobilenetv2"
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of its folder."""
        label = "".join(letter if letter.isalnum() or letter in ".-" else "_" for letter in self.label)
        return f"{self.part}_{self.data}_{self.split}_{label}_b{self.budget:.3g}_r{self.rate:g}_s{self.seed}"

    def folder(self, logdir: Path) -> Path:
        """Of its results."""
        return logdir / self.data / self.name

    def flags(
        self,
        table: TimingTable,
        head: np.ndarray,
        steps_per_epoch: int,
        reference_seconds: float | None = None,
    ) -> dict[str, Any]:
        """Flags of main.py beside those of the network and the images.

        Args:
            table: of the network.
            head: bool [N] over `model.trainable_variables`, its tensors.
            steps_per_epoch: of the data set.
            reference_seconds: what the budget is a share of; by default full training's time at this batch size.
        """
        if not SCHEMES[self.train_type].takes("num_epochs"):
            return {"train_type": self.train_type, "seed": self.seed}
        full = reference_seconds or full_seconds(table, steps_per_epoch)
        values = {"train_type": self.train_type, "learning_rate": self.rate, "seed": self.seed, **self.more}
        is_elastic = SCHEMES[self.train_type].is_elastic
        if is_elastic and self.rho is None:
            return {**values, "deadline": round(self.budget * full, 1)}
        if "num_epochs" not in self.more:
            steps = self._steps(table, head, steps_per_epoch, self.budget * full)
            values["num_epochs"] = max(math.ceil(steps / steps_per_epoch), 1)
            values["max_steps"] = steps
            if is_elastic:
                values["interval"] = round(steps / steps_per_epoch + 5e-4, 3)  # it selects once
        return {**values, "rho": self.rho} if is_elastic else values

    def _steps(self, table: TimingTable, head: np.ndarray, steps_per_epoch: int, left: float) -> int:
        """How many steps fit into `left` seconds."""
        views = 2  # with --augment flip
        if self.more.get("recipe") == "robust":  # it averages the head
            left -= AVERAGING_SECONDS + steps_per_epoch * table.forward_ms / 1e3
        if self.train_type == "traditional_tl_training":
            head_ms = table.predict_ms(head, 0.0) + LOOP_MS

            def head_seconds(epochs: int) -> float:
                making_ms = min(epochs, views) * table.forward_ms  # its images' features
                return steps_per_epoch * (making_ms + epochs * head_ms) / 1e3

            epochs = next(n for n in range(MAX_HEAD_EPOCHS, 0, -1) if n == 1 or head_seconds(n) <= left)
            return epochs * steps_per_epoch
        if SCHEMES[self.train_type].is_elastic:
            assert self.rho is not None, "an elastic run has a rho"
            step_ms = self.rho * table.full_step_ms
            left -= SELECTION_SECONDS
        else:
            step_ms = table.full_step_ms
        return max(int(1e3 * left / (step_ms + LOOP_MS)), steps_per_epoch // 2)


def full_seconds(table: TimingTable, steps_per_epoch: int) -> float:
    """What full training takes for `EPOCHS` epochs, without its validations."""
    return EPOCHS * steps_per_epoch * (table.full_step_ms + LOOP_MS) / 1e3
