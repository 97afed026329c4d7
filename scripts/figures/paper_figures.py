"""The paper's figures and tables as lists of runs, and the values that it shows there.

A figure is a list of runs and a plot. Runs of one setting are shared: the full training of Fig 17 is that of Fig 15.
Values are from the paper (doi 10.1145/3581791.3596852).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import plotting  # first: it sets the import path
from resolutions import PREFIX, RESOLUTIONS

from elastic_trainer.selection.named import SCHEMES
from elastic_trainer.settings import PRESETS

PAPER = PRESETS["paper"]
CUB, PET, DOGS = "caltech_birds2011", "oxford_iiit_pet", "stanford_dogs"
IMAGES = {CUB: 5994, PET: 3680, DOGS: 12000, "digits": 898}  # for training
NETWORKS = ("resnet50", "vgg16", "mobilenetv2", "vit")
RHOS = (0.35, 0.4, 0.5, 0.6, 0.7)
LAYERS = (1, 5, 10, 20, 40, 70, 110)  # ResNet50 has 107 with weights
CLASSES = {CUB: 200, PET: 37, DOGS: 120, "digits": 10}
BASELINES = ("full_training", "traditional_tl_training", "bn_plus_bias_training")
SHORT = {"interval": "interval", "importance_batches": "batches", "trained_layers": "layers", "num_epochs": "epochs"}
Flags = dict[str, Any]  # of main.py, those that are not left to their default


def _run(model_name: str, dataset_name: str, train_type: str = "elastic_training", **more: object) -> Flags:
    return {"model_name": model_name, "dataset_name": dataset_name, "train_type": train_type, **more}


def is_elastic(run: Flags) -> bool:
    """Whether the run selects tensors within a time budget, which needs a timing table."""
    return SCHEMES[run["train_type"]].is_elastic


def run_name(run: Flags) -> str:
    """The name of its folder: all that distinguishes it from other runs under the same logdir."""
    parts = [run["model_name"].rpartition("/")[2].replace(":", "-"), run["dataset_name"], run["train_type"]]
    parts += [f"rho{100 * run['rho']:g}"] if "rho" in run else []
    parts += [f"{short}{run[name]:g}" for name, short in SHORT.items() if name in run]
    return "_".join([*parts, f"seed{run['seed']}"])


class PaperFigure(NamedTuple):
    """What a script scripts/run_figure<name>.sh makes; docs/paper_figures.md says what it shows.

    Attributes:
        plot: the kind of `plot.KINDS` that draws it, or "profiling"; of bars, also the quantities.
    """

    plot: tuple[str, ...]
    runs: tuple[Flags, ...]


def _schemes(model: str, data: str, rho: float) -> tuple[Flags, ...]:
    return (_run(model, data, rho=rho), *(_run(model, data, scheme) for scheme in BASELINES))


_CUB = _schemes("resnet50", CUB, 0.5)
_PRUNED = _run("resnet50", CUB, "prunetrain")
_BUDGETS = (*(_run("resnet50", CUB, rho=rho) for rho in RHOS), *_CUB[1:], _PRUNED)
_THREE = tuple(run for data in (CUB, PET, DOGS) for run in _schemes("resnet50", data, 0.5))
# The paper's scripts give MobileNetV2's full training, and it alone, 24 epochs.
_NETWORKS = tuple(
    run | ({"num_epochs": 24} if (model, run["train_type"]) == ("mobilenetv2", "full_training") else {})
    for model in NETWORKS
    for run in _schemes(model, CUB, 0.4)
)
_IMPORTANCES = ("elastic_training", "elastic_training_weight_magnitude", "elastic_training_grad_magnitude")
_AND_RANDOM = (*_IMPORTANCES, "elastic_training_random")  # a control, which the paper does not have
_BY_IMPORTANCE = tuple(_run("resnet50", data, kind, rho=0.5) for data in (CUB, PET) for kind in _AND_RANDOM)
# An interval of 3 epochs for each T_q: it has one selection, as in longer runs.
_BY_RESOLUTION = (_run("resnet50", CUB, f"{PREFIX}{T_q}", rho=0.5, num_epochs=3) for T_q in RESOLUTIONS)
_SELECTED = (_run("resnet50", CUB, rho=0.7), _CUB[0], _run("resnet50", PET, rho=0.7), _run("vgg16", PET, rho=0.7))
_BY_BATCHES = (_run("resnet50", CUB, rho=0.5, importance_batches=k, max_steps=8) for k in (1, 2, 4, 8, 16))
_LAYERS = (_run("resnet50", CUB, "last_layers_training", trained_layers=k, num_epochs=3) for k in LAYERS)
_CURVES, _BARS = ("curves",), ("bars", "accuracy", "hours")

FIGURES = {
    "2": PaperFigure(("layers",), (*_LAYERS,)),
    "7": PaperFigure(("importance",), (_CUB[0] | {"interval": 1}, *_BY_BATCHES)),
    "13": PaperFigure(("solver",), (*_BY_RESOLUTION, _CUB[1])),
    "15": PaperFigure(_CURVES, _THREE),
    "15ad": PaperFigure(_CURVES, _CUB),
    "16": PaperFigure(_CURVES, _THREE[:8]),
    "17ac": PaperFigure(_BARS, _BUDGETS),
    "17bd": PaperFigure(("bars", "flops"), _BUDGETS),
    "18": PaperFigure(("flops",), (*_BUDGETS[:5], _CUB[1])),
    "19": PaperFigure(_BARS, _NETWORKS),
    "20": PaperFigure(("bars", "accuracy"), _BY_IMPORTANCE),
    "21": PaperFigure(("maps",), _SELECTED),
    "22": PaperFigure(("bars", "memory"), (*_CUB, _PRUNED)),
    "23": PaperFigure(("bars", "energy"), (*_CUB, _PRUNED)),
    "table1": PaperFigure(("profiling",), tuple(_run(model, CUB, rho=0.5) for model in NETWORKS)),
    "table2": PaperFigure(("time_to_accuracy",), _THREE),
}
EGO = ("15", "15ad", "16", "17ac", "19")  # figures with a variant of the elastic runs alone, <name>_ego

# The quick scale takes minutes on two cores: the digits; MobileNetV2 with the settings of digits, other networks at 32
# pixels, ResNet50 and VGG16 for a few steps only, no ViT.
QUICK_SHARE, QUICK_SIZE, QUICK_STEPS = 2, 32, 12  # of the paper's epochs; pixels; steps
QUICK_INTERVAL = 4  # over the paper's: a selection takes as long as an epoch of digits
QUICK_SECONDS = 10  # for measuring steps while profiling


def runs_of(figure: str, seeds: int, is_quick: bool, dataset_name: str | None, model_name: str | None) -> list[Flags]:
    """The runs of a figure, seed by seed.

    Args:
        figure: a key of `FIGURES`, or of a variant of `EGO`.
        seeds: of each run.
        is_quick: at the quick scale.
        dataset_name, model_name: None keeps the figure's.
    """
    base = figure.removesuffix("_ego")
    found: dict[str, Flags] = {}  # by name: runs that become equal occur once
    for seed in range(seeds):
        for run in FIGURES[base].runs:
            model = model_name
            if is_quick and not model_name:
                if run["model_name"] == "vit":
                    continue  # its profile alone takes four minutes
                model = None if base in ("19", "table1") else "mobilenetv2"
            data = dataset_name or ("digits" if is_quick else run["dataset_name"])
            changed = {**run, "dataset_name": data, "model_name": model or run["model_name"], "seed": seed}
            if model and run.get("num_epochs") == 24:  # these are for MobileNetV2 only
                del changed["num_epochs"]
            if is_quick:
                changed = _quick(changed, is_given=bool(model_name))
            if is_elastic(run) or base == figure:
                name = run_name(changed)
                found[name] = {**_settings_of_paper(is_quick), **changed, "run_name": name}
    return [*found.values()]


def _settings_of_paper(is_quick: bool) -> Flags:
    """The flags that give a run the paper's settings, at the quick scale for the digits."""
    return {"preset": "demo", "feature_cache": PAPER.feature_cache} if is_quick else {"preset": "paper"}


def _quick(run: Flags, is_given: bool) -> Flags:
    """The same run at the quick scale; `is_given`: its network was chosen by the user."""
    run = {**run, "num_epochs": math.ceil(QUICK_SHARE * run.get("num_epochs", PAPER.num_epochs))}
    if is_elastic(run):
        run["interval"] = math.ceil(QUICK_INTERVAL * run.get("interval", PAPER.interval))
    if run["model_name"] != "mobilenetv2":
        run |= {"input_size": QUICK_SIZE, "weights": "none"}
        run |= {} if is_given else {"num_epochs": 1, "max_steps": QUICK_STEPS}
    return run


# --- what the paper shows ---------------------------------------------------------------------------------------------

# All are read off its plots, and are of the Jetson TX2 except Fig 16. The keys are (data set, network, scheme, ρ); the
# values are in the order in which a figure draws its quantities: % and hours; TFLOPs; GB; J. By their size, its TFLOPs
# are multiply-accumulates (full training, 12 epochs of 5,994 images at 3 × 3.86 G each, has 833 T of these). Here they
# are doubled.

Values = dict[plotting.PaperKey, tuple[float, ...]]


def _by_scheme(data: str, model: str, rho: float, *values: Sequence[float]) -> Values:
    schemes = ("elastic_training", *BASELINES, "prunetrain")
    return {
        (data, model, scheme, rho if scheme == "elastic_training" else None): tuple(of_scheme)
        for scheme, of_scheme in zip(schemes, values, strict=False)
    }


def _budgets(values: Sequence[Sequence[float]], *others: Sequence[float]) -> Values:
    elastic: Values = {
        (CUB, "resnet50", "elastic_training", rho): tuple(one) for rho, one in zip(RHOS, values, strict=True)
    }
    return {**_by_scheme(CUB, "resnet50", 0.5, values[2], *others), **elastic}


_FIG15 = {
    **_by_scheme(CUB, "resnet50", 0.5, (67.95, 1.92), (69.54, 3.59), (43.1, 1.31), (57.6, 2.47)),
    **_by_scheme(PET, "resnet50", 0.5, (90.0, 1.12), (89.5, 2.19), (86.7, 0.82), (88.8, 1.53)),
    **_by_scheme(DOGS, "resnet50", 0.5, (80.15, 3.26), (77.7, 6.55), (77.1, 2.23), (79.0, 4.54)),
}
REFERENCE: dict[str, Mapping[Any, Any]] = {
    "15": _FIG15,
    "15ad": _FIG15,
    "16": {
        # The legends of traditional TL and BN+Bias look swapped on CUB; here they follow Fig 17c.
        **_by_scheme(CUB, "resnet50", 0.5, (69.1, 30.1), (70.4, 48.7), (44.0, 22.0), (58.2, 35.7)),
        **_by_scheme(PET, "resnet50", 0.5, (89.6, 18.2), (88.3, 28.8), (87.0, 12.9), (87.8, 21.6)),
    },
    "17ac": _budgets(
        ((56.5, 0.78), (66.5, 0.845), (68.7, 1.25), (69.1, 1.385), (70.0, 1.75)),
        *((69.2, 2.94), (43.2, 0.695), (57.6, 1.79), (69.4, 2.79)),
    ),
    "17bd": _budgets(((582,), (620,), (760,), (868,), (1034,)), (1700,), (568,), (1144,), (1190,)),
    "19": {
        **_by_scheme(CUB, "resnet50", 0.4, (66.5, 0.84), (69.2, 2.94), (43.2, 0.70), (57.6, 1.79)),
        **_by_scheme(CUB, "vgg16", 0.4, (54.8, 1.61), (41.6, 3.47), (48.2, 1.12), (48.8, 2.50)),
        **_by_scheme(CUB, "mobilenetv2", 0.4, (52.0, 0.46), (51.5, 2.11), (30.2, 0.23), (36.0, 0.76)),
        **_by_scheme(CUB, "vit", 0.4, (83.5, 2.94), (73.1, 7.82), (81.6, 2.63), (85.1, 4.16)),
    },
    "20": {
        (data, "resnet50", kind, 0.5): (percent,)
        for data, percents in ((CUB, (67.95, 65.2, 67.0)), (PET, (90.0, 89.2, 89.55)))
        for kind, percent in zip(_IMPORTANCES, percents, strict=True)
    },
    # Step over full training's and solver over training, in %, for T_q of 10, 100, … 100,000.
    "13": {"resnet50": ((99.4, 52.8, 48.9, 49.8, 49.8), (0.01, 0.03, 0.87, 11.5, 138))},
    # Printed: profiling in % of an epoch; speedup at each of three accuracies.
    "table1": {"resnet50": (0.42,), "vgg16": (1.00,), "mobilenetv2": (0.60,), "vit": (0.61,)},
    "table2": {
        CUB: ((0.60, 2.19), (0.64, 1.86), (0.68, 1.88)),
        PET: ((0.85, 2.94), (0.87, 2.52), (0.89, 2.44)),
        DOGS: ((0.77, 1.80), (0.78, 1.67), (0.79, 1.79)),
    },
    "22": _by_scheme(CUB, "resnet50", 0.5, (7.4,), (7.3,), (6.9,), (7.2,), (7.6,)),
    "23": _by_scheme(CUB, "resnet50", 0.5, (3.15e4,), (9.72e4,), (2.52e4,), (6.02e4,), (9.32e4,)),
}
