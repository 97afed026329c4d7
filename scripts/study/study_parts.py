"""The parts of the study, each a list of runs. All but those of `rows`, whose epochs are fixed, have a time budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from results_page import TRAIN_TYPES, scheme_of
from study_runs import StudyRun

from elastic_trainer.settings import RATE_BATCH, RECIPES, rate_at

SHARES = (1 / 4, 1 / 8, 1 / 16, 1 / 3, 1 / 2, 1.0)  # of full training's time at `REFERENCE_BATCH`
REFERENCE_BATCH, REFERENCE_RATE = 4, 3e-3  # tuned (docs/log/learning_rate.md)
LARGE_BATCH, LARGE_RATE = RATE_BATCH, RECIPES["robust"]["learning_rate"]
MEMORY_LIMITS = (1_540, 1_440)  # MB of the process, which has 1,130 before; the head alone needs 1,380
FLAGS: dict[str, Any] = {"recipe": "robust", "save_model": False}  # without its first model


def _full(part: str, data: str) -> StudyRun:
    """Full training at batches of 32, in all of its time."""
    return StudyRun(
        part, "full, batch 32", data, "test", "full_training", LARGE_RATE, 1.0, batch_size=LARGE_BATCH, more=FLAGS
    )


def _selecting(full: StudyRun, label: str) -> StudyRun:
    """Elastic training at rho 0.5 that selects once: the upper part, by importance (*elastic*) or at random."""
    train_type = TRAIN_TYPES[scheme_of(label)]
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
    run = replace(full, label="deadline", train_type="elastic_training_upper_part", more={"recipe": "robust"})
    return _each_seed(seeds, [replace(run, budget=share) for share in (1 / 4, 1 / 3, 1 / 2)])


def memory(data: str, seeds: int) -> list[StudyRun]:
    """What is reached in memory of which size, in an eighth of full training's time at batches of 4."""
    full = _full("memory", data)
    found = [
        replace(full, label=f"full, batch {size}", batch_size=size, rate=rate_at(LARGE_RATE, size))
        for size in (32, 16, 8, 4)
    ]
    found.append(replace(full, label="head", train_type="traditional_tl_training"))
    for limit in MEMORY_LIMITS:
        for by in ("upper", "elastic"):
            run = _selecting(full, f"{by} 0.5, {limit:,} MB")
            found.append(replace(run, more={**run.more, "memory": f"{limit}M", "micro_batch": LARGE_BATCH}))
    return _each_seed(seeds, found, budget=1 / 8)


def second_network(data: str, seeds: int) -> list[StudyRun]:
    """EfficientNet-Lite0: the upper part in a sixth, a quarter and a third of the time of full training's 12 epochs.

    All at batches of 32, the recipe's; full training in a third of that time, too.
    """
    full = replace(_full("second_network", data), label="full", network="efficientnet_lite")
    upper = _selecting(full, "upper 0.5")
    found = [full, *(replace(upper, budget=share) for share in (1 / 3, 1 / 4, 1 / 6))]
    return _each_seed(seeds, [*found, replace(full, budget=1 / 3)])


def rows(data: str, seeds: int) -> list[StudyRun]:
    """Recurrent and attention networks that read the digits row by row, from random weights; `data` is not used."""
    more = {"augment": "none", "num_epochs": 40}
    found = []
    for network in ("gru", "vit"):
        run = StudyRun("rows", "", "digits", "test", "full_training", 1e-3, 1.0, network=network, more=more)
        for scheme in ("full", "elastic", "upper"):
            is_elastic = scheme != "full"
            found.append(
                replace(
                    run,
                    label=f"{network}, {scheme}",
                    train_type=TRAIN_TYPES[scheme],
                    rho=0.5 if is_elastic else None,
                    more={**more, "interval": 10} if is_elastic else more,
                )
            )
    return _each_seed(seeds, found)


PARTS: dict[str, Callable[[str, int], Sequence[StudyRun]]] = {
    "equal_time": equal_time,
    "one_command": one_command,
    "memory": memory,
    "second_network": second_network,
    "rows": rows,
}
