"""The parts of the study, each a list of runs. All but those of `rows`, whose epochs are fixed, have a time budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from study_runs import StudyRun

from elastic_trainer.registry import SCHEMES
from elastic_trainer.settings import RATE_BATCH, RECIPES, rate_at

BUDGETS = (1 / 4, 1 / 2, 1.0, 1 / 8)
RHOS = (0.25, 0.4, 0.6)
UPPER_RHOS = (*RHOS, 0.8)
COMPARED = ("full", "elastic 0.4", "upper 0.4")
DECIDING = (*COMPARED, "upper 0.6", "upper 0.8")
REPEATED = ("random 0.4", "upper 0.25", "elastic 0.6")  # at one budget
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
SHARES = (1 / 4, 1 / 8, 1 / 16, 1 / 2, 1.0)  # of full training's time at `REFERENCE_BATCH`
REFERENCE_BATCH, LARGE_BATCH, LARGE_RATE = 4, RATE_BATCH, RECIPES["robust"]["learning_rate"]
MEMORY_LIMITS = (1_540, 1_440)  # MB of the process, which has 1,130 before; the head alone needs 1,380
PATH_BATCHES = 129  # the first is judged by none
RATE, ELASTIC_RATE = 3e-3, 5e-3  # tuned at batch 4 (docs/log/learning_rate.md)
ROBUST: dict[str, Any] = {name: RECIPES["robust"][name] for name in ("gradient_clipping", "warmup")}


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


def selected_by(data: str, seeds: int) -> list[StudyRun]:
    """What tensors are selected by, at batches of 32: depth, importance, importance per millisecond, or chance."""
    upper = StudyRun(
        "selected_by", "upper part", data, "test", "elastic_training_upper_part", LARGE_RATE, 1 / 4, rho=0.5
    )
    upper = replace(upper, batch_size=LARGE_BATCH, more={**ROBUST, "validation_share": 0.1})
    importance = replace(upper, train_type="elastic_training", label="importance, 4 batches")
    importance = replace(importance, more={**upper.more, "importance_batches": 4})
    found = [
        upper,
        replace(importance, label="importance, 1 batch", more={**upper.more, "importance_batches": 1}),
        importance,
        replace(importance, label="importance per ms, 4 batches", train_type="elastic_training_greedy"),
        replace(upper, label="random", train_type="elastic_training_random"),
    ]
    return _each_seed(seeds, [replace(run, budget=share) for run in found for share in (1 / 4, 1 / 8)])


def batches(data: str, seeds: int) -> list[StudyRun]:
    """Batch size and learning rate for 8 epochs of the upper part, one selection, on val."""
    upper = replace(_settings("batches", data, "val")["upper 0.6"], rho=0.5)
    upper = replace(upper, more={**upper.more, "num_epochs": 8, "interval": 1e3})
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
        compared = [upper, full] if share < 1 else [full]
        compared += [elastic, at_random] if share in SHARES[:2] else []
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
                    more={**more, "interval": 10} if is_elastic else more,
                )
            )
    return _each_seed(seeds, found)


PARTS: dict[str, Callable[[str, int], Sequence[StudyRun]]] = {
    "budget": budget,
    "selected_by": selected_by,
    "batches": batches,
    "equal_time": equal_time,
    "memory": memory,
    "second_network": second_network,
    "rows": rows,
}
