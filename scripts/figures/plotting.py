"""What all figures share: how finished runs are read and grouped, how the schemes look, how a figure is written.

Figures are made from logs alone. Each is written as PDF and PNG, with its numbers as CSV beside it. Colours are those
of Okabe and Ito, which colour-blind people tell apart; markers, dashes and hatches tell the schemes apart in greyscale.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from elastic_trainer.runs.config import without_effect

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

import utils
from elastic_trainer.settings import PAPER
from utils import UserError

if TYPE_CHECKING:
    import keras
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from elastic_trainer.timing.table import TimingTable

COLUMN, PAGE = 3.4, 7.0  # widths in inches
STYLE: dict[str, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "legend.fontsize": 7,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.2,
    "lines.markersize": 3,
    "hatch.linewidth": 0.5,
    "figure.constrained_layout.use": True,
    "pdf.fonttype": 42,
}


class Look(NamedTuple):
    label: str
    colour: str
    marker: str
    dashes: str
    hatch: str


LOOKS = {
    "elastic_training": Look("ElasticTrainer", "#0072b2", "o", "-", ""),
    "full_training": Look("Full training", "#d55e00", "s", "--", "///"),
    "traditional_tl_training": Look("Traditional TL", "#009e73", "^", "-.", "..."),
    "bn_plus_bias_training": Look("BN+Bias", "#cc79a7", "v", ":", "xxx"),
    "prunetrain": Look("PruneTrain", "#e69f00", "D", (0, (5, 1, 1, 1, 1, 1)), "\\\\\\"),  # type: ignore[arg-type]
    "elastic_training_weight_magnitude": Look("Weight magnitude", "#56b4e9", "P", "--", "+++"),
    "elastic_training_grad_magnitude": Look("Gradient magnitude", "#999999", "X", "-.", "ooo"),
    "last_layers_training": Look("Last layers", "#000000", "*", "-", "---"),
}
SHADES = ("#002b45", "#0072b2", "#4a9fd0", "#92c8e8", "#c9e4f5")  # of ElasticTrainer, where several budgets are shown
DATASETS = {"caltech_birds2011": "CUB-200", "oxford_iiit_pet": "Oxford-IIIT Pet", "stanford_dogs": "Stanford Dogs"}
NETWORKS = {"resnet50": "ResNet50", "vgg16": "VGG16", "mobilenetv2": "MobileNetV2", "vit": "ViT-B/16"}
ALIKE = ("input_size", "batch_size", "num_classes", "alpha", "optimizer")
SCALE = "full"  # of the figures that run_figure.py draws: what is not "full" is said above them


@dataclass(frozen=True)
class FinishedRun:
    """What a run left: its folder, summary.json, config.json, and the rows of metrics.csv."""

    folder: Path
    summary: dict[str, Any]
    config: dict[str, Any]
    epochs: list[dict[str, str]]

    def column(self, name: str) -> list[float]:
        """A column of metrics.csv; nan where a row is empty."""
        return [float(row[name]) if row.get(name) else np.nan for row in self.epochs]


def read_run(folder: Path) -> FinishedRun:
    """Raises `UserError` where `folder` holds no finished run."""
    try:
        summary, config = (
            json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in ("summary", "config")
        )
        with (folder / "metrics.csv").open(newline="", encoding="utf-8") as file:
            run = FinishedRun(folder, summary, config, [*csv.DictReader(file)])
        if summary["train_type"] not in LOOKS or not run.epochs:
            raise ValueError(f"a run of {summary['train_type']} with {len(run.epochs)} epochs")
        return run
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{folder}: does not hold a finished run ({error})") from error


class Group(NamedTuple):
    """Runs of one setting that differ in their seed alone."""

    runs: list[FinishedRun]

    @property
    def first(self) -> FinishedRun:
        return self.runs[0]

    @property
    def look(self) -> Look:
        return LOOKS[self.first.summary["train_type"]]

    @property
    def place(self) -> tuple[str, str]:
        """Its network and data set, as they are called in figures."""
        return network(self.first), dataset(self.first)

    @property
    def paper_key(self) -> tuple[str, str, str, float | None] | None:
        """What its values are found by in `paper_figures.REFERENCE`; None where its setting is not the paper's."""
        config = self.first.config
        size = config["input_size"], config["batch_size"], config.get("max_steps")
        if size != (PAPER["input_size"], PAPER["batch_size"], None) or config["num_epochs"] < 12:
            return None
        return config["dataset_name"], config["model_name"], config["train_type"], self.first.summary["rho"]

    @property
    def label(self) -> str:
        """The scheme, with its budget where it has one."""
        rho, config = self.first.summary.get("rho"), self.first.config
        layers = f" {config['trained_layers']}" if config["train_type"] == "last_layers_training" else ""
        return self.look.label + (f" ρ={100 * rho:g}%" if rho else "") + layers

    def values(self, of: Callable[[FinishedRun], float | None]) -> np.ndarray:
        """[runs], without those that have none."""
        found = [of(run) for run in self.runs]
        return np.array([value for value in found if value is not None], float)

    def mean(self, of: Callable[[FinishedRun], float | None]) -> float:
        values = self.values(of)
        return float(values.mean()) if len(values) else np.nan

    def spread(self, of: Callable[[FinishedRun], float | None]) -> float:
        """Standard deviation over the seeds; 0 where there is one."""
        values = self.values(of)
        return float(values.std(ddof=1)) if len(values) > 1 else 0.0


def group_runs(folders: Sequence[Path]) -> list[Group]:
    """The runs in `folders`, those that differ in their seed alone together.

    Raises:
        UserError: a folder holds no finished run, or two hold the same setting and seed.
    """
    found: dict[str, list[FinishedRun]] = {}
    for folder in folders:
        run = read_run(folder)
        free = {*without_effect(run.config), "environment", "seed"}
        setting = sorted((name, repr(value)) for name, value in run.config.items() if name not in free)
        alike = found.setdefault(repr(setting), [])
        for other in alike:
            if other.config["seed"] == run.config["seed"]:
                raise UserError(f"{run.folder}: has the setting and the seed of {other.folder}; name one of them")
        alike.append(run)
    groups = [Group(runs) for runs in found.values()]
    order = [*LOOKS]
    return sorted(
        groups, key=lambda group: (order.index(group.first.summary["train_type"]), group.first.summary["rho"] or 0)
    )


def network_and_table(args: argparse.Namespace) -> tuple[keras.Model, TimingTable]:
    """The network of a run's options, with weights of no meaning, and its timing table, wherever it was made.

    Raises:
        UserError: there is no such table, or it is of another network.
    """
    utils.load_tensorflow()
    import keras

    import models
    from elastic_trainer.networks.tensors import tensor_names
    from elastic_trainer.timing.table import load_table

    keras.utils.clear_session()  # layers are numbered as in a process of its own, where the table was made
    args = argparse.Namespace(**{**vars(args), "weights": "none", "allow_stale_profile": True})
    model = models.build_from_options(args)
    shapes = [tuple(variable.shape) for variable in model.trainable_variables]
    return model, load_table(args, tensor_names(model), shapes)


def network(run: FinishedRun) -> str:
    name, alpha = run.config["model_name"], run.config.get("alpha", 1)
    return NETWORKS.get(name, name) + (f" ×{alpha:g}" if alpha != 1 else "")


def dataset(run: FinishedRun) -> str:
    name = run.config["dataset_name"]
    if name == "image_folder":
        return Path(run.config["data_dir"]).name
    return DATASETS.get(name, name)


def setting(groups: Sequence[Group]) -> str:
    """What was run, in a line (so that a small run never passes for the paper's)."""
    runs = [run for group in groups for run in group.runs]

    def all_of(values: Iterable[Any]) -> str:
        return ", ".join(dict.fromkeys(map(str, values)))

    def length(run: FinishedRun) -> str:
        steps = run.config.get("max_steps")
        return f"{steps} steps" if steps else f"{run.summary['epochs']} epochs"

    sizes, batches = ([run.config[name] for run in runs] for name in ("input_size", "batch_size"))
    random = ", random weights" if any(run.config.get("weights") == "none" for run in runs) else ""
    seeds = max(len(group.runs) for group in groups)
    return (
        f"{all_of(map(network, runs))} on {all_of(map(dataset, runs))}, "
        f"{all_of(sizes)} px, batch {all_of(batches)}, "
        f"{all_of(map(length, runs))}{random}, {seeds} seed{'s' if seeds > 1 else ''}"
    )


def new_figure(width: float, height: float, title: str) -> Figure:
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update(STYLE)  # type: ignore[arg-type]
    figure = Figure(figsize=(width, height), layout="constrained")
    title = title if SCALE == "full" else f"{SCALE}: {title}"
    characters = int(width * 22)  # of this size, in a line
    figure.suptitle("\n".join(textwrap.wrap(title, characters)), fontsize=7, color="0.35")
    return figure


def save(figure: Figure, stem: Path, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Write the figure as PDF and PNG and its numbers as CSV; says so."""
    utils.save_figure(figure, stem)
    utils.write_csv(stem.with_name(f"{stem.name}.csv"), columns, rows)
    print(f"figure: {stem}.pdf and .png; its numbers: {stem}.csv")


def legend_below(figure: Figure, axes: Axes, columns: int = 3) -> None:
    """One legend for the whole figure, under it."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(columns, len(labels)), frameon=False)


def colours(groups: Sequence[Group]) -> list[str]:
    """A colour for each; several budgets of elastic training get shades."""
    told = [(group.first.summary["train_type"], group.first.summary["rho"]) for group in groups]
    budgets = [*dict.fromkeys(rho for scheme, rho in told if scheme == "elastic_training")]
    if len(budgets) < 2:
        return [group.look.colour for group in groups]
    return [
        SHADES[budgets.index(rho) % len(SHADES)] if scheme == "elastic_training" else LOOKS[scheme].colour
        for scheme, rho in told
    ]


def draw_by_name(description: str | None, kinds: Mapping[str, Callable[[Sequence[Group], Path], None]]) -> None:
    """The command line of a script that draws one of several figures, named first, from the folders of runs."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=[*kinds])
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder of a run, such as logs/<run_name>")
    parser.add_argument("--output", type=Path, help="figure without its ending")
    args = parser.parse_args()
    kinds[args.kind](group_runs(args.runs), args.output or Path("figures") / args.kind)
