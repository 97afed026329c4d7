"""What all figures share: groups of finished runs, the look of each scheme, and how a figure is written.

Figures are made from logs alone. The colours are those of Okabe and Ito, which colour-blind readers can distinguish;
markers, dashes and hatches distinguish the schemes in greyscale.

Importing this module puts the checkout and scripts/benchmarks on the import path, so a script starts from any folder.
It is imported first.
"""

from __future__ import annotations

import sys
import textwrap
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from finished_runs import FinishedRun, read_run

from elastic_trainer.datasets.named import DATASETS
from elastic_trainer.selection.named import SCHEMES
from elastic_trainer.settings import MAIN_FLAGS, PRESETS
from elastic_trainer.system.errors import UserError, figure_text
from elastic_trainer.system.files import save_figure, write_csv

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
PaperKey = tuple[str, str, str, float | None]  # data set, network, scheme, ρ: how values of the paper are looked up
Rows = list[dict[str, Any]]  # of a figure's CSV file
COLUMN, PAGE = 3.4, 7.0  # widths in inches
BLUE, RED = "#0072b2", "#d55e00"
STYLE: dict[str, Any] = {
    "font.size": 8,
    "axes.titlesize": "medium",
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
    "pdf.fonttype": 42,
}


class Look(NamedTuple):
    """How a scheme is drawn."""

    label: str
    colour: str
    marker: str
    dashes: Any
    hatch: str


_STYLES: dict[str, tuple[Any, ...]] = {  # the other fields of `Look`
    "elastic_training": ("#0072b2", "o", "-", ""),
    "full_training": ("#d55e00", "s", "--", "///"),
    "traditional_tl_training": ("#009e73", "^", "-.", "..."),
    "bn_plus_bias_training": ("#cc79a7", "v", ":", "xxx"),
    "prunetrain": ("#e69f00", "D", (0, (5, 1, 1, 1, 1, 1)), "\\\\\\"),
    "elastic_training_weight_magnitude": ("#56b4e9", "P", "--", "+++"),
    "elastic_training_grad_magnitude": ("#999999", "X", "-.", "ooo"),
    "elastic_training_random": ("#b2df8a", "h", ":", "\\\\"),
    "elastic_training_upper_part": ("#6a3d9a", "<", "--", "//"),
    "last_layers_training": ("#000000", "*", "-", "---"),
}
_OTHER_STYLES = (("#882255", "p", "-.", "++"), ("#44aa99", ">", ":", "xx"), ("#999933", "d", "--", "||"))
SHADES = ("#002b45", "#0072b2", "#4a9fd0", "#92c8e8", "#c9e4f5")  # of ElasticTrainer if several budgets are shown
LABELS = {  # of data sets and networks
    "caltech_birds2011": "CUB-200",
    "oxford_iiit_pet": "Oxford-IIIT Pet",
    "stanford_dogs": "Stanford Dogs",
    "resnet50": "ResNet50",
    "vgg16": "VGG16",
    "mobilenetv2": "MobileNetV2",
    "vit": "ViT-B/16",
}


def look_of(train_type: str) -> Look:
    """How a scheme is drawn; one that is not registered here has its name as label."""
    label = SCHEMES[train_type].label if train_type in SCHEMES else train_type
    other = _OTHER_STYLES[zlib.crc32(train_type.encode()) % len(_OTHER_STYLES)]
    return Look(label, *_STYLES.get(train_type, other))


@dataclass(frozen=True)
class Group:
    """Runs of one setting that differ in their seed alone, and their colour."""

    runs: list[FinishedRun]
    colour: str

    @property
    def config(self) -> dict[str, Any]:
        """That of the first run; only its seed differs from those of the others."""
        return self.runs[0].config

    @property
    def train_type(self) -> str:
        return self.runs[0].summary["train_type"]

    @property
    def rho(self) -> float | None:
        """The budget that was asked for."""
        return self.runs[0].summary.get("rho")

    @property
    def look(self) -> Look:
        return look_of(self.train_type)

    @property
    def place(self) -> tuple[str, str]:
        """The names of network and data set in figures; drawn as `figure_text`."""
        network, alpha, dataset = self.config["model_name"], self.config.get("alpha", 1), self.config["dataset_name"]
        if dataset == "image_folder":
            dataset = Path(self.config["data_dir"]).name
        return LABELS.get(network, network) + (f" ×{alpha:g}" if alpha != 1 else ""), LABELS.get(dataset, dataset)

    @property
    def paper_key(self) -> PaperKey | None:
        """The key of its values in `paper_figures.REFERENCE`; None if its setting is not the paper's."""
        config, paper = self.config, PRESETS["paper"]
        size = config["input_size"], config["batch_size"], config.get("max_steps")
        if size != (paper.input_size, paper.batch_size, None) or config["num_epochs"] < 12:
            return None
        return config["dataset_name"], config["model_name"], config["train_type"], self.rho

    @property
    def label(self) -> str:
        """The scheme, with its budget if it has one."""
        layers = f" {self.config['trained_layers']}" if self.train_type == "last_layers_training" else ""
        return self.look.label + (f" ρ={100 * self.rho:g}%" if self.rho else "") + layers

    def values(self, of: str | Callable[[FinishedRun], float | None]) -> np.ndarray:
        """`of` each run that has the value; a name is one of summary.json."""
        found = [run.summary.get(of) if isinstance(of, str) else of(run) for run in self.runs]
        return np.array([value for value in found if value is not None], float)

    def mean(self, of: str) -> float:
        """The mean of a value of summary.json over the runs; NaN if none has it."""
        values = self.values(of)
        return float(values.mean()) if len(values) else np.nan


def without_effect(config: dict[str, Any]) -> set[str]:
    """Settings that do not change the result of a run, unless they say which images there are, or what a step takes."""
    free = {"checkpoint_minutes", *(name for name, flag in MAIN_FLAGS.items() if flag.is_free)} - {"micro_batch"}
    dataset = DATASETS.get(config["dataset_name"])
    return free - ({"data_dir"} if dataset is None or dataset.is_folder else set())


def group_runs(folders: Sequence[Path]) -> list[Group]:
    """The runs in `folders`; those that differ in their seed alone are in one group.

    If there are several budgets of elastic training, they get shades of its colour.

    Raises:
        UserError: a folder holds no finished run, or two hold the same setting and seed.
    """
    found: dict[str, list[FinishedRun]] = {}
    for folder in folders:
        run = read_run(folder)
        free = {*without_effect(run.config), "environment", "seed", "images"}
        setting = sorted((name, repr(value)) for name, value in run.config.items() if name not in free)
        alike = found.setdefault(repr(setting), [])
        for other in alike:
            if other.config["seed"] == run.config["seed"]:
                raise UserError(f"{run.folder}: has the setting and the seed of {other.folder}; name one of them")
        alike.append(run)
    groups = [Group(runs, look_of(runs[0].summary["train_type"]).colour) for runs in found.values()]
    order = [*_STYLES, *sorted({group.train_type for group in groups} - {*_STYLES})]
    groups.sort(key=lambda group: (order.index(group.train_type), group.rho or 0))
    budgets = [*dict.fromkeys(group.rho for group in groups if group.train_type == "elastic_training")]
    if len(budgets) < 2:
        return groups
    shades = {("elastic_training", rho): SHADES[k % len(SHADES)] for k, rho in enumerate(budgets)}
    return [Group(group.runs, shades.get((group.train_type, group.rho), group.colour)) for group in groups]


def seconds(run: FinishedRun) -> np.ndarray:
    """Training and testing up to the end of each epoch."""
    return np.array(run.column("train_seconds")) + np.array(run.column("validation_seconds"))


def deviation(values: np.ndarray) -> float:
    """Standard deviation of a sample; 0 for a single value."""
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0


def caption(groups: Sequence[Group]) -> str:
    """What was run, in one line, so that nobody mistakes a small run for the paper's."""
    runs = [run for group in groups for run in group.runs]

    def all_of(values: Iterable[Any]) -> str:
        return ", ".join(dict.fromkeys(map(str, values)))

    def length(run: FinishedRun) -> str:
        steps = run.config.get("max_steps")
        return f"{steps} steps" if steps else f"{run.summary['epochs']} epochs"

    sizes, batches = ([run.config[name] for run in runs] for name in ("input_size", "batch_size"))
    random = ", random weights" if any(run.config.get("weights") == "none" for run in runs) else ""
    seeds = max(len(group.runs) for group in groups)
    networks, datasets = (all_of(group.place[k] for group in groups) for k in range(2))
    return (
        f"{figure_text(f'{networks} on {datasets}')}, {all_of(sizes)} px, batch {all_of(batches)}, "
        f"{all_of(map(length, runs))}{random}, {seeds} seed{'s' if seeds > 1 else ''}"
    )


class Sheet(NamedTuple):
    """Where a figure is written, and what else than its runs it shows.

    Attributes:
        stem: of its files.
        scale: of its runs, one of `run_figure.SCALES`; the title starts with it unless it is "full".
        reference: values of the paper to mark, by the key of what they are compared with.
    """

    stem: Path
    scale: str = "full"
    reference: Mapping[Any, Any] = {}

    def figure(self, width: float, height: float, title: str) -> Figure:
        """A figure in the common style: width and height in inches, and small text above it."""
        import matplotlib
        from matplotlib.figure import Figure

        matplotlib.rcParams.update(STYLE)  # type: ignore[arg-type]
        figure = Figure(figsize=(width, height), layout="constrained")
        title, characters = title if self.scale == "full" else f"{self.scale}: {title}", int(width * 22)  # in a line
        figure.suptitle("\n".join(textwrap.wrap(title, characters)), fontsize=7, color="0.35")
        return figure

    def save(self, figure: Figure, rows: Sequence[Mapping[str, Any]], columns: int = 3) -> None:
        """Write the figure, with a legend of its labels below, as PDF and PNG, and its numbers as CSV; print where."""
        labels: dict[str, Any] = {}
        for axes in figure.axes:
            labels |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        if labels:
            place: dict[str, Any] = {"loc": "outside lower center", "ncols": min(columns, len(labels))}
            figure.legend(labels.values(), labels.keys(), **place, frameon=False)
        save_figure(figure, self.stem)
        write_csv(self.stem.with_name(f"{self.stem.name}.csv"), [*rows[0]], [[*row.values()] for row in rows])
        print(f"figure: {self.stem}.pdf and .png; its numbers: {self.stem}.csv")


def plot_band(axes: Axes, places: np.ndarray, curves: np.ndarray, group: Group) -> None:
    """The mean of `curves` [runs, points] over `places` [points], with a band of one standard deviation."""
    mean, look = curves.mean(0), group.look
    axes.plot(places, mean, color=group.colour, ls=look.dashes, marker=look.marker, label=group.label)
    if len(curves) > 1:
        spread = curves.std(0, ddof=1)
        axes.fill_between(places, mean - spread, mean + spread, color=group.colour, alpha=0.2, lw=0)


def draw_map(axes: Axes, edges: Sequence[float], chosen: np.ndarray) -> None:
    """Which tensors train when: bool `chosen` [selections, tensors] between `edges` [selections + 1], in epochs."""
    axes.pcolormesh(edges, np.arange(chosen.shape[1] + 1) - 0.5, chosen.T, cmap="Blues", vmin=0, vmax=1.25)
    axes.vlines(edges[1:-1], -0.5, chosen.shape[1] - 0.5, color="0.6", lw=0.4)
    axes.grid(visible=False)


def twin(axes: Axes, label: str) -> Axes:
    """A second vertical axis at the right."""
    right = axes.twinx()
    right.set_ylabel(label)
    right.grid(visible=False)
    return right


def mark_paper_values(lines: Callable[..., object], values: Mapping[int, float]) -> None:
    """A line across each bar that has a value of the paper, by the bar's place; `lines`: `Axes.hlines` or `vlines`."""
    for place, value in values.items():
        lines(value, place - 0.4, place + 0.4, color="black", lw=1, alpha=0.5, label="the paper's")
