"""What all figures share: groups of finished runs, the look of each scheme, and how a figure is written.

Figures are made from logs alone. Each is written as PDF and PNG, with its numbers as CSV beside it. The colours are
those of Okabe and Ito, which colour-blind readers can distinguish; markers, dashes and hatches distinguish the schemes
in greyscale.

Importing this module puts the checkout and scripts/benchmarks on the import path, so a script starts from any folder.
It is imported first.
"""

from __future__ import annotations

import sys
import textwrap
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import common  # noqa: F401 (puts the checkout on the path)
import numpy as np

from elastic_trainer.errors import UserError, figure_text
from elastic_trainer.files import save_figure, write_csv
from elastic_trainer.machine import load_tensorflow
from elastic_trainer.registry import SCHEMES
from elastic_trainer.runs.config import without_effect
from elastic_trainer.runs.reader import FinishedRun, read_run
from elastic_trainer.settings import PAPER

if TYPE_CHECKING:
    import keras
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from elastic_trainer.cli.commands import TrainCommand
    from elastic_trainer.timing.table import TimingTable

PaperKey = tuple[str, str, str, float | None]  # data set, network, scheme, ρ: how values of the paper are looked up
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
LOOKS = {name: Look(SCHEMES[name].label, *style) for name, style in _STYLES.items()}
# Of schemes that have no look of their own, by their names.
_OTHER_STYLES = (("#882255", "p", "-.", "++"), ("#44aa99", ">", ":", "xx"), ("#999933", "d", "--", "||"))
SHADES = ("#002b45", "#0072b2", "#4a9fd0", "#92c8e8", "#c9e4f5")  # of ElasticTrainer if several budgets are shown
DATASET_LABELS = {
    "caltech_birds2011": "CUB-200",
    "oxford_iiit_pet": "Oxford-IIIT Pet",
    "stanford_dogs": "Stanford Dogs",
}
NETWORK_LABELS = {"resnet50": "ResNet50", "vgg16": "VGG16", "mobilenetv2": "MobileNetV2", "vit": "ViT-B/16"}
ALIKE = ("input_size", "batch_size", "num_classes", "alpha", "optimizer")  # in runs that are compared


class Group(NamedTuple):
    """Runs of one setting that differ in their seed alone."""

    runs: list[FinishedRun]

    @property
    def first(self) -> FinishedRun:
        """A run that stands for all of them when the seed does not matter."""
        return self.runs[0]

    @property
    def train_type(self) -> str:
        """The scheme's name as a flag."""
        return self.first.summary["train_type"]

    @property
    def look(self) -> Look:
        """How the scheme is drawn."""
        return look_of(self.train_type)

    @property
    def place(self) -> tuple[str, str]:
        """Labels of the network and the data set."""
        return network_label(self.first), dataset_label(self.first)

    @property
    def paper_key(self) -> PaperKey | None:
        """The key of its values in `paper_figures.REFERENCE`; None if its setting is not the paper's."""
        config = self.first.config
        size = config["input_size"], config["batch_size"], config.get("max_steps")
        if size != (PAPER["input_size"], PAPER["batch_size"], None) or config["num_epochs"] < 12:
            return None
        return config["dataset_name"], config["model_name"], config["train_type"], self.first.summary["rho"]

    @property
    def label(self) -> str:
        """The scheme, with its budget if it has one."""
        rho, config = self.first.summary.get("rho"), self.first.config
        layers = f" {config['trained_layers']}" if config["train_type"] == "last_layers_training" else ""
        return self.look.label + (f" ρ={100 * rho:g}%" if rho else "") + layers

    def values(self, of: str | Callable[[FinishedRun], float | None]) -> np.ndarray:
        """`of` each run that has the value; a name is one of summary.json."""
        found = [run.summary.get(of) if isinstance(of, str) else of(run) for run in self.runs]
        return np.array([value for value in found if value is not None], float)

    def mean(self, of: str | Callable[[FinishedRun], float | None]) -> float:
        """The mean of `of` over the runs; NaN if none has the value."""
        values = self.values(of)
        return float(values.mean()) if len(values) else np.nan


def seconds(run: FinishedRun) -> np.ndarray:
    """Training and testing up to the end of each epoch."""
    return np.array(run.column("train_seconds")) + np.array(run.column("validation_seconds"))


def deviation(values: np.ndarray) -> float:
    """Standard deviation of a sample; 0 for a single value."""
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0


def look_of(train_type: str) -> Look:
    """How a scheme is drawn. One that is not registered here is called as in its record."""
    if train_type in LOOKS:
        return LOOKS[train_type]
    label = SCHEMES[train_type].label if train_type in SCHEMES else train_type
    return Look(label, *_OTHER_STYLES[zlib.crc32(train_type.encode()) % len(_OTHER_STYLES)])


Reference = Mapping[Any, Any] | None  # values of the paper, if they are to be marked


def group_runs(folders: Sequence[Path]) -> list[Group]:
    """The runs in `folders`; those that differ in their seed alone are in one group.

    Raises:
        UserError: a folder holds no finished run, or two hold the same setting and seed.
    """
    found: dict[str, list[FinishedRun]] = {}
    for folder in folders:
        run = read_run(folder)
        free = {*without_effect(run.config), "environment", "seed", "images", "run_id"}
        setting = sorted((name, repr(value)) for name, value in run.config.items() if name not in free)
        alike = found.setdefault(repr(setting), [])
        for other in alike:
            if other.config["seed"] == run.config["seed"]:
                raise UserError(f"{run.folder}: has the setting and the seed of {other.folder}; name one of them")
        alike.append(run)
    groups = [Group(runs) for runs in found.values()]
    order = [*LOOKS, *sorted({group.train_type for group in groups} - {*LOOKS})]
    return sorted(groups, key=lambda group: (order.index(group.train_type), group.first.summary["rho"] or 0))


def network_and_table(command: TrainCommand) -> tuple[keras.Model, TimingTable]:
    """The network of a run, with random weights, and its timing table, whichever machine the table is from.

    Raises:
        UserError: there is no such table, or it is of another network.
    """
    load_tensorflow()
    import keras

    import models
    from elastic_trainer.cli.commands import profiler_command
    from elastic_trainer.networks.tensors import tensor_names
    from elastic_trainer.task import ImageClassification
    from elastic_trainer.timing.graph_digest import graph_digest
    from elastic_trainer.timing.table_file import load_table, table_folder, table_settings

    keras.utils.clear_session()  # layers are numbered as in a new process, where the table was made
    network, logdir = replace(command.network, weights="none"), command.run.logdir
    model = models.build(network)
    shapes = [tuple(variable.shape) for variable in model.trainable_variables]
    remake = profiler_command(network, command.data, logdir)
    folder = table_folder(network, logdir)
    graph = graph_digest(ImageClassification(model), network.batch_size)
    settings = table_settings(network)
    return model, load_table(folder, settings, tensor_names(model), shapes, graph, remake, allow_stale=True)


def network_label(run: FinishedRun) -> str:
    """The network's name in figures; drawn as `figure_text`."""
    name, alpha = run.config["model_name"], run.config.get("alpha", 1)
    return NETWORK_LABELS.get(name, name) + (f" ×{alpha:g}" if alpha != 1 else "")


def dataset_label(run: FinishedRun) -> str:
    """The data set's name in figures; drawn as `figure_text`."""
    name = run.config["dataset_name"]
    if name == "image_folder":
        return Path(run.config["data_dir"]).name
    return DATASET_LABELS.get(name, name)


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
    return (
        f"{figure_text(f'{all_of(map(network_label, runs))} on {all_of(map(dataset_label, runs))}')}, "
        f"{all_of(sizes)} px, batch {all_of(batches)}, "
        f"{all_of(map(length, runs))}{random}, {seeds} seed{'s' if seeds > 1 else ''}"
    )


def new_figure(width: float, height: float, title: str, scale: str = "full") -> Figure:
    """A figure in the common style.

    Args:
        width, height: in inches.
        title: small text above the figure.
        scale: of the runs (`run_figure.SCALES`); the title starts with it unless it is "full".
    """
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update(STYLE)  # type: ignore[arg-type]
    figure = Figure(figsize=(width, height), layout="constrained")
    title = title if scale == "full" else f"{scale}: {title}"
    characters = int(width * 22)  # of this size, in a line
    figure.suptitle("\n".join(textwrap.wrap(title, characters)), fontsize=7, color="0.35")
    return figure


def plot_band(axes: Axes, places: np.ndarray, curves: np.ndarray, colour: str, look: Look, label: str) -> None:
    """The mean of `curves` [runs, points] over `places` [points], with a band of one standard deviation."""
    mean = curves.mean(0)
    axes.plot(places, mean, color=colour, ls=look.dashes, marker=look.marker, label=label)
    if len(curves) > 1:
        spread = curves.std(0, ddof=1)
        axes.fill_between(places, mean - spread, mean + spread, color=colour, alpha=0.2, lw=0)


def save(figure: Figure, stem: Path, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Write the figure as PDF and PNG and its numbers as CSV; prints where."""
    save_figure(figure, stem)
    write_csv(stem.with_name(f"{stem.name}.csv"), columns, rows)
    print(f"figure: {stem}.pdf and .png; its numbers: {stem}.csv")


def legend_below(figure: Figure, axes: Axes, columns: int = 3) -> None:
    """One legend for the entire figure, below it."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(columns, len(labels)), frameon=False)


def legend_once(axes: Axes) -> None:
    """A legend with the first of several lines of the same label."""
    axes.legend(*([found[0]] for found in axes.get_legend_handles_labels()))


def twin(axes: Axes, label: str) -> Axes:
    """A second vertical axis at the right."""
    right = axes.twinx()
    right.set_ylabel(label)
    right.grid(visible=False)
    return right


def mark_paper_values(lines: Callable[..., object], values: Mapping[int, float]) -> bool:
    """A line at the paper's value across each bar that has one, by the bar's place; returns whether any has.

    `lines`: `Axes.hlines`, or `Axes.vlines` for horizontal bars.
    """
    for place, value in values.items():
        lines(value, place - 0.4, place + 0.4, color="black", lw=1, alpha=0.5, label="the paper's")
    return bool(values)


def colours(groups: Sequence[Group]) -> list[str]:
    """A colour for each group; several budgets of elastic training get shades."""
    schemes = [(group.train_type, group.first.summary["rho"]) for group in groups]
    budgets = [*dict.fromkeys(rho for scheme, rho in schemes if scheme == "elastic_training")]
    if len(budgets) < 2:
        return [group.look.colour for group in groups]
    return [
        SHADES[budgets.index(rho) % len(SHADES)] if scheme == "elastic_training" else look_of(scheme).colour
        for scheme, rho in schemes
    ]
