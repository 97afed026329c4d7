"""The parts of the study, each a list of runs.

Every run gets a time budget: a share of what full training takes for `EPOCHS` epochs. It trains as many steps as fit,
with a cosine schedule over them. What a step takes is read from the timing table, so lengths do not depend on what else
the machine does during a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from results_page import FIRST_WORDS, scheme_of

from elastic_trainer.selection.named import SCHEMES
from elastic_trainer.settings import RATE, RATE_BATCH, rate_at
from elastic_trainer.timing.table import TimingTable

EPOCHS = 12  # of full training, the paper's
LOOP_MS = 1.0  # of a step beside its own time: images, records
SELECTION_SECONDS = 1.5
AVERAGING_SECONDS = 0.5  # of two heads at the end, beside the forward pass over all images
MAX_HEAD_EPOCHS = 40  # a head alone has long stopped to learn
VIEWS = 2  # of an image, with --augment flip
SHARES = (1 / 4, 1 / 8, 1 / 16, 1 / 3, 1 / 2, 1.0)  # of full training's time at `REFERENCE_BATCH`
REFERENCE_BATCH, REFERENCE_RATE = 4, 3e-3  # tuned (docs/log/learning_rate.md)
LARGE_BATCH, LARGE_RATE = RATE_BATCH, RATE
MEMORY_LIMITS = (1_540, 1_440)  # MB of the process, which has 1,130 before; the head alone needs 1,380


class Basis(NamedTuple):
    """What runs share that train the same network on the same images at the same batch size."""

    flags: dict[str, Any]  # of profiler.py and main.py
    table: TimingTable
    head: np.ndarray  # bool [N] over `model.trainable_variables`
    steps: int  # an epoch

    @property
    def full_seconds(self) -> float:
        """What full training takes for `EPOCHS` epochs, without its validations."""
        return EPOCHS * self.steps * (self.table.full_step_ms + LOOP_MS) / 1e3


@dataclass(frozen=True)
class StudyRun:
    """One run.

    Attributes:
        part: of the study.
        label: of the setting in tables; runs of one label differ in budget, rate and seed.
        data, split: see `study_data`.
        train_type, rho: flags. An elastic run without rho gets its budget as a deadline, and chooses its epochs.
        rate: learning rate.
        budget: share of full training's time for `EPOCHS` epochs; in the part `one_command` of its wall time in all.
        batch_size: of the network's steps. In the parts `equal_time`, `one_command` and `memory`, a budget is
            a share of full training's time at `REFERENCE_BATCH`, in the others at this batch size.
        network: a name of `--model_name`.
        more: further flags of main.py.
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
        label = "".join(letter if letter.isalnum() or letter in ".-" else "_" for letter in self.label)
        return f"{self.part}_{self.data}_{self.split}_{label}_b{self.budget:.3g}_r{self.rate:g}_s{self.seed}"

    def folder(self, logdir: Path) -> Path:
        return logdir / self.data / self.name

    @property
    def settings(self) -> dict[str, Any]:
        """What no two rows of a part's results share."""
        about = {"setting": self.label, "data": self.data, "split": self.split}
        return {**about, "budget": self.budget, "learning_rate": self.rate, "seed": self.seed}

    def flags(self, basis: Basis, reference_seconds: float | None = None) -> dict[str, Any]:
        """Flags of main.py; `reference_seconds`: what the budget is a share of, by default `basis.full_seconds`."""
        if not self.budget:  # the head in closed form
            return {**basis.flags, "train_type": self.train_type, "seed": self.seed}
        seconds = self.budget * (reference_seconds or basis.full_seconds)
        own = {"train_type": self.train_type, "learning_rate": self.rate, "seed": self.seed, **self.more}
        is_elastic = SCHEMES[self.train_type].is_elastic
        if is_elastic and self.rho is None:
            return {**basis.flags, **own, "deadline": round(seconds, 1)}
        steps = self._steps(basis, seconds)
        own |= {"num_epochs": max(math.ceil(steps / basis.steps), 1), "max_steps": steps}
        if is_elastic:
            own |= {"rho": self.rho, "interval": round(steps / basis.steps + 5e-4, 3)}  # it selects once
        return {**basis.flags, **own}

    def _steps(self, basis: Basis, left: float) -> int:
        """How many steps fit into `left` seconds."""
        table = basis.table
        left -= AVERAGING_SECONDS + basis.steps * table.forward_ms / 1e3
        if self.train_type == "traditional_tl_training":
            epochs, head_ms = np.arange(1, MAX_HEAD_EPOCHS + 1), table.predict_ms(basis.head, 0.0) + LOOP_MS
            ends = basis.steps * (table.forward_ms * np.minimum(epochs, VIEWS) + epochs * head_ms) / 1e3
            return max(int(np.count_nonzero(ends <= left)), 1) * basis.steps
        step_ms = table.full_step_ms
        if SCHEMES[self.train_type].is_elastic:
            assert self.rho is not None
            step_ms *= self.rho
            left -= SELECTION_SECONDS
        return max(int(1e3 * left / (step_ms + LOOP_MS)), basis.steps // 2)


def _full(part: str, data: str) -> StudyRun:
    """Full training at batches of 32, in all of its time, by the preset for photos."""
    run = StudyRun(part, "full, batch 32", data, "test", "full_training", LARGE_RATE, 1.0)
    return replace(run, batch_size=LARGE_BATCH, more={"save_model": False})  # without its first model


def _selecting(full: StudyRun, label: str) -> StudyRun:
    """Elastic training at rho 0.5 that selects once: the upper part, by importance (*elastic*) or at random."""
    train_type = FIRST_WORDS[scheme_of(label)][0]
    more = {"importance_batches": 4} if train_type == "elastic_training" else {}
    return replace(full, label=label, train_type=train_type, rho=0.5, more={**full.more, **more})


def _each_seed(seeds: int, runs: Sequence[StudyRun], **changed: Any) -> list[StudyRun]:
    """All runs with the first seed, then all with the next; `changed`: fields of all."""
    return [replace(run, seed=seed, **changed) for seed in range(seeds) for run in runs]


def equal_time(data: str, seeds: int) -> list[StudyRun]:
    """What each scheme reaches at batches of 32 in a share of the time that full training takes at batches of 4."""
    full = _full("equal_time", data)
    upper, *others = (_selecting(full, f"{by} 0.5, batch 32") for by in ("upper", "elastic", "random"))
    head = replace(upper, label="head in closed form", train_type="closed_form_head", budget=0.0, rho=None)
    reference = replace(full, label="full, batch 4", batch_size=REFERENCE_BATCH, rate=REFERENCE_RATE)
    found = [head]
    for share in SHARES:
        compared = [upper, full] if share < 1 else [full]
        compared += others if share in SHARES[:2] else []
        found += [replace(run, budget=share) for run in compared]
    return _each_seed(seeds, [*found, reference])


def one_command(data: str, seeds: int) -> list[StudyRun]:
    """What `main.py --deadline` reaches in a share of the wall time that full training at batches of 4 takes in all."""
    full = _full("one_command", data)
    run = replace(full, label="deadline", train_type="elastic_training_upper_part", more={})
    return _each_seed(seeds, [replace(run, budget=share) for share in (1 / 4, 1 / 3, 1 / 2)])


def memory(data: str, seeds: int) -> list[StudyRun]:
    """What is reached in memory of which size, in an eighth of full training's time at batches of 4."""
    full = _full("memory", data)
    sizes = {size: rate_at(size) for size in (32, 16, 8, 4)}
    found = [replace(full, label=f"full, batch {size}", batch_size=size, rate=rate) for size, rate in sizes.items()]
    found.append(replace(full, label="head", train_type="traditional_tl_training"))
    for limit in MEMORY_LIMITS:
        for by in ("upper", "elastic"):
            run = _selecting(full, f"{by} 0.5, {limit:,} MB")
            found.append(replace(run, more={**run.more, "memory": f"{limit}M", "micro_batch": LARGE_BATCH}))
    return _each_seed(seeds, found, budget=1 / 8)


def second_network(data: str, seeds: int) -> list[StudyRun]:
    """EfficientNet-Lite0: the upper part in a sixth, a quarter and a third of the time of full training's 12 epochs.

    All at batches of 32, the preset's; full training in a third of that time, too.
    """
    full = replace(_full("second_network", data), label="full", network="efficientnetlite0")
    upper = _selecting(full, "upper 0.5")
    found = [full, *(replace(upper, budget=share) for share in (1 / 3, 1 / 4, 1 / 6))]
    return _each_seed(seeds, [*found, replace(full, budget=1 / 3)])


PARTS: dict[str, Callable[[str, int], Sequence[StudyRun]]] = {
    "equal_time": equal_time,
    "one_command": one_command,
    "memory": memory,
    "second_network": second_network,
}
