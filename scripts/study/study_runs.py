"""The runs of the study, part by part, and how many steps each may take.

Every run gets a time budget: a share of what full training takes for `EPOCHS` epochs. It trains as many steps as fit,
with a cosine schedule over them. What a step takes is read from the timing table, so lengths do not depend on what else
the machine does during a run. The runs of `rows` alone have a fixed number of epochs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from study_data import FIRST, SECOND

from elastic_trainer.registry import SCHEMES
from elastic_trainer.settings import PAPER, RATE_BATCH, RECIPES, rate_at
from elastic_trainer.timing.table import TimingTable

EPOCHS = 12  # of full training, the paper's (section 6)
LOOP_MS = 1.0  # of a step beside its own time: images, records
SELECTION_SECONDS = 1.5
BUDGETS = (1 / 4, 1 / 2, 1.0, 1 / 8)
RHOS = (0.25, 0.4, 0.6)
UPPER_RHOS = (*RHOS, 0.8)
COMPARED = ("full", "elastic 0.4", "upper 0.4")
WARMED_UP = (*COMPARED, "upper 0.6")
DECIDING = (*WARMED_UP, "upper 0.8")
REPEATED = ("random 0.4", "upper 0.25", "elastic 0.6")  # at one budget
TUNED_LABELS = ("full", "elastic 0.4", "upper 0.4", "random 0.4", "BN+Bias", "head", "PruneTrain")
IMPORTANCE_BATCHES = 16
SELECTED_BY = {
    "upper part": "elastic_training_upper_part",
    "random": "elastic_training_random",
    "weight magnitude": "elastic_training_weight_magnitude",
    "gradient magnitude": "elastic_training_grad_magnitude",
}
VARIANTS = {  # of `study_variants`
    "greedy, by importance per ms": "elastic_training_greedy",
    "whole layers": "elastic_training_layers",
    "the paper's problem": "elastic_training_published",
    "Betti numbers": "elastic_training_betti",
    "gain over 128 steps": "elastic_training_path",
}
BATCH_RATES = {8: (0.005, 0.01, 0.02), 16: (0.01, 0.02, 0.04), 32: (0.01, 0.02, 0.04), 64: (0.02, 0.04, 0.08)}
SHARES = (1 / 4, 1 / 8, 1 / 16, 1 / 2)  # of full training's time at `REFERENCE_BATCH`
REFERENCE_BATCH, LARGE_BATCH, LARGE_RATE = 4, RATE_BATCH, RECIPES["robust"]["learning_rate"]
MEMORY_LIMITS = (1_540, 1_440)  # MB of the process, which has 1,130 before; the head alone needs 1,380
PATH_BATCHES = 129  # the first is judged by none
INTERVALS = (0.5, 1, 2, 3, 4, 6)
MAX_HEAD_EPOCHS = 40  # a head alone has long stopped to learn
RATES = (1e-2, 3e-3, 1e-3)
WARM_UP_RATES = (5e-3, 1e-2, 3e-3)
PAPER_RATE = PAPER["learning_rate"]
RATE, ELASTIC_RATE = 3e-3, 5e-3  # tuned at batch 4 (docs/log/learning_rate.md)
ROBUST: dict[str, Any] = {name: RECIPES["robust"][name] for name in ("gradient_clipping", "warmup")}


@dataclass(frozen=True)
class StudyRun:
    """One run.

    Attributes:
        part: of the study.
        label: of the setting in tables; runs of one label differ in budget, rate and seed.
        data, split: see `study_data`; "digits" are those of main.py.
        train_type, rho: flags. An elastic run without rho gets a deadline instead, and chooses its epochs.
        rate: learning rate.
        budget: share of full training's time for `EPOCHS` epochs.
        selections: of an elastic run, at equal distances, unless `interval`, in epochs, is given.
        after: the name of the run of the same data set that it continues from, with a new head.
        batch_size: of the network's steps. In the parts `equal_time` and `memory`, a budget is a share of full
            training's time at `REFERENCE_BATCH`, in the others at this batch size.
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
    selections: int = 1
    interval: float | None = None
    after: str | None = None
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
        masks: dict[str, np.ndarray],
        steps_per_epoch: int,
        validation_batches: int,
        reference_seconds: float | None = None,
    ) -> dict[str, Any]:
        """Flags of main.py beside those of the network and the images.

        Args:
            table: of the network.
            masks: bool [N] over `model.trainable_variables`, by train type.
            steps_per_epoch, validation_batches: of the data set.
            reference_seconds: what the budget is a share of; by default full training's time at this batch size.
        """
        if SCHEMES[self.train_type].is_closed_form:
            return {"train_type": self.train_type, "seed": self.seed}
        full = reference_seconds or full_seconds(table, steps_per_epoch)
        values = {"train_type": self.train_type, "learning_rate": self.rate, "seed": self.seed, **self.more}
        is_elastic = SCHEMES[self.train_type].is_elastic
        if is_elastic and self.rho is None:  # what it is given has room for its validations
            validating = EPOCHS * validation_batches * table.forward_ms / 1e3
            return {**values, "deadline": round(self.budget * (full + validating), 1)}
        interval = self.interval
        if "num_epochs" not in self.more:
            steps = self._steps(table, masks, steps_per_epoch, self.budget * full)
            values["num_epochs"] = max(math.ceil(steps / steps_per_epoch), 1)
            values["max_steps"] = steps
            interval = interval or round(steps / steps_per_epoch / self.selections + 5e-4, 3)
        return {**values, "rho": self.rho, "interval": interval} if is_elastic else values

    def _steps(self, table: TimingTable, masks: dict[str, np.ndarray], steps_per_epoch: int, left: float) -> int:
        """How many steps fit into `left` seconds."""
        views = 2  # with --augment flip
        is_cached = self.more.get("feature_cache") != "off"
        head_ms = table.predict_ms(masks["traditional_tl_training"], 0.0 if is_cached else 1.0) + LOOP_MS

        def head_seconds(epochs: float) -> float:
            making_ms = min(epochs, views) * table.forward_ms if is_cached else 0.0  # its images' features
            return steps_per_epoch * (making_ms + epochs * head_ms) / 1e3

        if self.train_type == "traditional_tl_training":
            epochs = next(n for n in range(MAX_HEAD_EPOCHS, 0, -1) if n == 1 or head_seconds(n) <= left)
            return epochs * steps_per_epoch
        if SCHEMES[self.train_type].is_elastic:
            assert self.rho is not None, "an elastic run has a rho"
            step_ms = self.rho * table.full_step_ms
            if self.interval:
                step_ms += 1e3 * SELECTION_SECONDS / (self.interval * steps_per_epoch)
            else:
                left -= self.selections * SELECTION_SECONDS
        elif self.train_type in ("bn_plus_bias_training", "last_layers_training"):
            step_ms = table.predict_ms(masks[self.train_type])
        else:
            step_ms = table.full_step_ms
        return max(int(1e3 * left / (step_ms + LOOP_MS)), steps_per_epoch // 2)


def full_seconds(table: TimingTable, steps_per_epoch: int) -> float:
    """What full training takes for `EPOCHS` epochs, without its validations."""
    return EPOCHS * steps_per_epoch * (table.full_step_ms + LOOP_MS) / 1e3


def _settings(part: str, data: str, split: str) -> dict[str, StudyRun]:
    """The schemes that are compared under a budget, by label, with the robust recipe's rates, clipping and warm-up.

    PruneTrain too, which main.py's recipe does not change. Budget and seed are open. Elastic training selects once,
    unless its label says otherwise.
    """
    run = StudyRun(part, "", data, split, "full_training", RATE, 1.0, more=ROBUST)
    partly = replace(run, rate=ELASTIC_RATE)
    elastic = replace(partly, train_type="elastic_training", more={**ROBUST, "importance_batches": IMPORTANCE_BATCHES})
    upper = replace(partly, train_type="elastic_training_upper_part")
    at_random = replace(partly, train_type="elastic_training_random", rho=0.4)
    found = {
        "full": run,
        **{f"elastic {rho:g}": replace(elastic, rho=rho) for rho in RHOS},
        **{f"upper {rho:g}": replace(upper, rho=rho) for rho in UPPER_RHOS},
        "elastic 0.4, 3 selections": replace(elastic, rho=0.4, selections=3),
        "random 0.4": at_random,
        "random 0.4, 3 selections": replace(at_random, selections=3),
        "BN+Bias": replace(run, train_type="bn_plus_bias_training"),
        "head": replace(run, train_type="traditional_tl_training"),
        "head, no cache": replace(run, train_type="traditional_tl_training", more={**ROBUST, "feature_cache": "off"}),
        "PruneTrain": replace(run, train_type="prunetrain"),
        "elastic 0.4, no cache": replace(elastic, rho=0.4, more={**elastic.more, "feature_cache": "off"}),
    }
    return {label: replace(setting, label=label) for label, setting in found.items()}


def _each_seed(seeds: int, runs: Sequence[StudyRun], **changed: Any) -> list[StudyRun]:
    """All runs with the first seed, then all with the next; `changed`: fields of all."""
    return [replace(run, seed=seed, **changed) for seed in range(seeds) for run in runs]


def _without_warm_up(run: StudyRun) -> StudyRun:
    return replace(run, more={**run.more, "warmup": 0.0})


def rates(data: str, seeds: int) -> list[StudyRun]:
    """The learning rate of each scheme, tuned on val at a quarter of full training's time."""
    settings = _settings("rates", data, "val")
    found = [_without_warm_up(replace(settings[label], rate=rate)) for rate in RATES for label in TUNED_LABELS]
    return _each_seed(seeds, found, budget=1 / 4)


def warm_up(data: str, seeds: int) -> list[StudyRun]:
    """Whether the learning rate should rise over the first steps, on val at a quarter of full training's time."""
    settings = _settings("warm_up", data, "val")
    found = [
        replace(settings[label], label=f"{label}, warm-up over a tenth of the steps", rate=rate)
        for rate in WARM_UP_RATES
        for label in WARMED_UP
        if (label, rate) != ("upper 0.6", min(WARM_UP_RATES))  # there, nothing collapses
    ]
    return _each_seed(seeds, found, budget=1 / 4)


def budget(data: str, seeds: int) -> list[StudyRun]:
    """What each scheme reaches in a share of full training's time, on test.

    The settings that decide get `seeds` runs at each budget. The others come at one budget, which is the first; of them
    those of `REPEATED` get `seeds` runs, the rest one.
    """
    settings = _settings("budget", data, "test")
    deciding = [settings[label] for label in DECIDING]
    others = [
        replace(run, seed=seed)
        for label, run in settings.items()
        if label not in DECIDING
        for seed in range(seeds if label in REPEATED else 1)
    ]
    runs = [*_each_seed(seeds, deciding), *others]
    found = [replace(run, budget=BUDGETS[0]) for run in runs]
    for share in BUDGETS[1:]:
        found += _each_seed(seeds, deciding if share < 1 else [settings["full"]], budget=share)
    return found


def importance(data: str, seeds: int) -> list[StudyRun]:
    """What is selected by: importance and its batches, tensors or layers, the exact solver or others."""
    elastic = _settings("importance", data, "test")["elastic 0.4"]
    found = {f"importance, {n} batches": replace(elastic, more={**ROBUST, "importance_batches": n}) for n in (16, 4, 1)}
    for label, train_type in SELECTED_BY.items():
        reads_batches = train_type == "elastic_training_grad_magnitude"
        found[label] = replace(elastic, train_type=train_type, more=elastic.more if reads_batches else ROBUST)
    for label, train_type in VARIANTS.items():
        batches = {"importance_batches": PATH_BATCHES} if train_type == "elastic_training_path" else {}
        found[label] = replace(elastic, train_type=train_type, more={**elastic.more, **batches})
    return _each_seed(seeds, [replace(run, label=label) for label, run in found.items()], budget=1 / 4)


def remedies(data: str, seeds: int) -> list[StudyRun]:
    """What might select better than the upper part, on val at a quarter of full training's time."""
    settings = _settings("remedies", data, "val")
    found = [settings[label] for label in ("upper 0.4", "elastic 0.4", "random 0.4")]
    label = "greedy, by importance per ms"
    found.append(replace(settings["elastic 0.4"], label=label, train_type=VARIANTS[label]))
    return _each_seed(seeds, found, budget=1 / 4)


def deadline(data: str, seeds: int) -> list[StudyRun]:
    """What `--deadline` chooses: a share of full training's time for 12 epochs and their validations."""
    upper = _settings("deadline", data, "test")["upper 0.4"]
    run = replace(upper, label="deadline", rho=None)
    return _each_seed(seeds, [replace(run, budget=share) for share in BUDGETS if share < 1])


def interval(data: str, seeds: int) -> list[StudyRun]:
    """How often to select, in half of full training's time."""
    settings = _settings("interval", data, "test")
    found = []
    for label in ("elastic 0.4", "upper 0.4"):
        run = settings[label]
        found.append(replace(run, label=f"{label}, never again"))
        found += [replace(run, label=f"{label}, every {epochs:g} epochs", interval=epochs) for epochs in INTERVALS]
    return _each_seed(seeds, found, budget=1 / 2)


def recipe(data: str, seeds: int) -> list[StudyRun]:
    """The paper's settings and the robust ones for two networks and batch sizes, on val at a quarter of the time."""
    settings = _settings("recipe", data, "val")
    found = []
    for network, remark in (("mobilenetv2", ""), ("resnet", "ResNet, ")):
        for batch_size in (4, 16):
            for label in ("full", "upper 0.4"):
                run = replace(settings[label], batch_size=batch_size, network=network)
                found.append(replace(run, label=f"{label}, {remark}robust, batch {batch_size}"))
                paper = _without_warm_up(replace(run, rate=PAPER_RATE, more={"gradient_clipping": 0.0}))
                found.append(replace(paper, label=f"{label}, {remark}paper, batch {batch_size}"))
    return _each_seed(seeds, found, budget=1 / 4)


def batches(data: str, seeds: int) -> list[StudyRun]:
    """Batch size and learning rate for 8 epochs of the upper part, one selection, on val."""
    upper = replace(_settings("batches", data, "val")["upper 0.6"], rho=0.5, interval=1e3)
    upper = replace(upper, more={**upper.more, "num_epochs": 8})
    found = [
        replace(upper, label=f"upper 0.5, batch {size}", batch_size=size, rate=rate)
        for size, rates in BATCH_RATES.items()
        for rate in rates
    ]
    return _each_seed(seeds, found)


def equal_time(data: str, seeds: int) -> list[StudyRun]:
    """What each scheme reaches at batches of 32 in a share of the time that full training takes at batches of 4."""
    settings, more = _settings("equal_time", data, "test"), {"validation_share": 0.1}
    large = {"batch_size": LARGE_BATCH, "rate": LARGE_RATE}
    full = replace(settings["full"], label="full, batch 32", **large, more={**ROBUST, **more})
    elastic = replace(full, label="elastic 0.5, batch 32", train_type="elastic_training", rho=0.5)
    elastic = replace(elastic, more={**ROBUST, **more, "importance_batches": 4})
    upper = replace(full, label="upper 0.5, batch 32", train_type=SELECTED_BY["upper part"], rho=0.5)
    at_random = replace(upper, label="random 0.5, batch 32", train_type=SELECTED_BY["random"])
    head = replace(upper, label="head in closed form", train_type="closed_form_head", budget=0.0, rho=None)
    reference = replace(settings["full"], label="full, batch 4", budget=1.0, more={**ROBUST, **more})
    found = [head]
    for share in SHARES:
        compared = (upper, full, elastic, at_random) if share in SHARES[:2] else (upper, full)
        found += [replace(run, budget=share) for run in compared]
    return _each_seed(seeds, [*found, reference])


def memory(data: str, seeds: int) -> list[StudyRun]:
    """What is reached in memory of which size, in an eighth of full training's time at batches of 4."""
    settings, more = _settings("memory", data, "test"), {**ROBUST, "validation_share": 0.1}
    full = replace(settings["full"], more=more)
    found = [
        replace(full, label=f"full, batch {size}", batch_size=size, rate=rate_at(LARGE_RATE, size))
        for size in (32, 16, 8, 4)
    ]
    large = replace(full, batch_size=LARGE_BATCH, rate=LARGE_RATE)
    found.append(replace(large, label="head", train_type="traditional_tl_training"))
    upper = replace(large, train_type=SELECTED_BY["upper part"], rho=0.5)
    elastic = replace(large, train_type="elastic_training", rho=0.5, more={**more, "importance_batches": 4})
    for limit in MEMORY_LIMITS:
        for name, run in (("upper", upper), ("elastic", elastic)):
            limited = {**run.more, "memory": f"{limit}M"}
            found.append(replace(run, label=f"{name} 0.5, {limit:,} MB", more=limited))
    return _each_seed(seeds, found, budget=1 / 8)


def second_network(data: str, seeds: int) -> list[StudyRun]:
    """EfficientNet-Lite0: the upper part in a sixth, a quarter and a third of the time of full training's 12 epochs.

    All at batches of 32, the recipe's; full training in a third of that time, too.
    """
    full = replace(
        _settings("second_network", data, "test")["full"],
        network="efficientnet_lite",
        batch_size=LARGE_BATCH,
        rate=LARGE_RATE,
        more={**ROBUST, "validation_share": 0.1},
    )
    upper = replace(full, label="upper 0.5", train_type=SELECTED_BY["upper part"], rho=0.5)
    found = [replace(full, budget=1.0), *(replace(upper, budget=share) for share in (1 / 3, 1 / 4, 1 / 6))]
    return _each_seed(seeds, [*found, replace(full, budget=1 / 3)])


def first_half(data: str, seeds: int) -> list[StudyRun]:
    """Full training on the first half of the classes, before `second_half`."""
    full = _settings("forgetting", data, FIRST)["full"]
    return _each_seed(seeds, [replace(full, more={**full.more, "save_model": True})], budget=1 / 2)


def second_half(data: str, seeds: int) -> list[StudyRun]:
    """The other half of the classes after the first."""
    settings = _settings("forgetting", data, SECOND)
    second = [settings[label] for label in (*COMPARED, "BN+Bias", "head")]
    return [
        replace(run, budget=1 / 4, seed=first.seed, after=first.name, more={**run.more, "save_model": True})
        for first in first_half(data, seeds)
        for run in second
    ]


def rows(data: str, seeds: int) -> list[StudyRun]:
    """Recurrent and attention networks that read the digits row by row, from random weights; `data` is not used."""
    more = {"augment": "none", "num_epochs": 40}
    schemes = {"full": "full_training", "elastic": "elastic_training", "upper": "elastic_training_upper_part"}
    found = []
    for network in ("gru", "vit"):
        run = StudyRun("rows", "", "digits", "test", "full_training", 1e-3, 1.0, network=network, more=more)
        for label, train_type in schemes.items():
            is_elastic = SCHEMES[train_type].is_elastic
            found.append(
                replace(
                    run,
                    label=f"{network}, {label}",
                    train_type=train_type,
                    rho=0.5 if is_elastic else None,
                    interval=10 if is_elastic else None,
                )
            )
    return _each_seed(seeds, found)


PARTS: dict[str, Callable[[str, int], Sequence[StudyRun]]] = {
    "rates": rates,
    "warm_up": warm_up,
    "budget": budget,
    "importance": importance,
    "remedies": remedies,
    "deadline": deadline,
    "interval": interval,
    "recipe": recipe,
    "batches": batches,
    "equal_time": equal_time,
    "memory": memory,
    "second_network": second_network,
    "first_half": first_half,
    "second_half": second_half,
    "rows": rows,
}
