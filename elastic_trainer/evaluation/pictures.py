"""Pictures of what a model gets wrong: the confusion matrix and the worst mistakes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from elastic_trainer.evaluation.class_report import shortened
from elastic_trainer.evaluation.predictions import Answers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


SHOWN_CONFUSIONS = 30  # pairs named beside a confusion matrix whose axes have no room for names
COUNTED_CLASSES = 15  # up to so many, the matrix shows numbers in its cells
SMALLEST_FONT = 5.0  # points; smaller names are no names


def draw_confusion(counts: np.ndarray, names: Sequence[str]) -> Figure:
    """The confusion matrix, each row as shares of its true class.

    Few classes have their counts in the cells; names stand at the axes as long as they can be read; where they cannot,
    numbers do, and the most frequent mistakes are listed beside.

    Args:
        counts: [true class, predicted class].
        names: of the classes.
    """
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    classes = len(names)
    side = float(np.clip(1.5 + 0.3 * classes, 4.5, 12.0))  # inches
    font = min(9.0, 0.7 * 72 * side / classes)
    named = font >= SMALLEST_FONT
    figure = Figure(figsize=(side + (1.2 if named else 4.5), side), layout="constrained")
    columns = figure.add_gridspec(1, 2, width_ratios=(side, 3.5)) if not named else figure.add_gridspec(1, 1)
    axes = figure.add_subplot(columns[0])
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    # The square root of the share decides on the colour: one image in fifty must not look like none.
    drawn = axes.imshow(shares, cmap="Blues", norm=PowerNorm(0.5, 0, 1), interpolation="nearest")
    axes.set_title("share of each true class (row) that is taken for each class (column)", fontsize=9)
    axes.set_xlabel("predicted class" if named else "predicted class (numbers as in classes.csv)")
    axes.set_ylabel("true class" if named else "true class (numbers as in classes.csv)")
    if named:
        short = [shortened(name, 24) for name in names]
        axes.set_xticks(range(classes), short, rotation=90, fontsize=font)
        axes.set_yticks(range(classes), short, fontsize=font)
    else:
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(nbins=20, integer=True))
        _list_confusions(figure.add_subplot(columns[1]), counts, names)
    if classes <= COUNTED_CLASSES:
        for row, column in np.argwhere(counts):
            colour = "white" if shares[row, column] > 0.35 else "black"
            axes.text(column, row, str(counts[row, column]), ha="center", va="center", fontsize=font, color=colour)
    figure.colorbar(drawn, ax=axes, shrink=0.6, pad=0.02, ticks=(0, 0.05, 0.2, 0.5, 1))
    return figure


def _list_confusions(axes: Axes, counts: np.ndarray, names: Sequence[str]) -> None:
    wrong = counts - np.diag(np.diag(counts))
    order = np.argsort(-wrong, axis=None, kind="stable")[:SHOWN_CONFUSIONS]
    lines = ["most frequent mistakes", ""]
    for true, predicted in zip(*np.unravel_index(order, wrong.shape), strict=True):
        if wrong[true, predicted]:
            told = [f"{shortened(names[k], 24)} ({k})" for k in (true, predicted)]
            lines.append(f"{wrong[true, predicted]}×  {told[0]}\n       taken for {told[1]}")
    axes.axis("off")
    axes.text(0, 1, "\n".join(lines), fontsize=8, va="top", linespacing=1.3, transform=axes.transAxes)


def draw_mistakes(answers: Answers, names: Sequence[str]) -> Figure:
    """The worst mistakes as a sheet of pictures, the highest loss first."""
    from matplotlib.figure import Figure

    columns = min(6, len(answers.mistakes))
    rows = math.ceil(len(answers.mistakes) / columns)
    figure = Figure(figsize=(max(1.8 * columns, 4.5), 2.1 * rows + 0.4), layout="constrained")
    total = int((answers.labels != answers.predictions).sum())
    shown = f"the {len(answers.mistakes)} worst of " if total > len(answers.mistakes) else ""
    figure.suptitle(f"{shown}{total} mistakes in {len(answers.labels)} test images", fontsize=9)
    for position, mistake in enumerate(answers.mistakes, start=1):
        axes = figure.add_subplot(rows, columns, position)
        axes.imshow(mistake.image, interpolation="nearest")
        axes.set_axis_off()
        said = f"said {shortened(names[mistake.prediction], 18)} ({mistake.confidence:.0%})"
        axes.set_title(f"is {shortened(names[mistake.label], 22)}\n{said}", fontsize=6.5)
    return figure
