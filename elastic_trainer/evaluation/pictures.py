"""Pictures of an evaluation: the confusion matrix, and a sheet of misclassified images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from elastic_trainer.evaluation.predictions import Predictions
from elastic_trainer.system.errors import figure_text, importing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


SHOWN_CONFUSIONS = 30  # pairs listed beside a confusion matrix that is too large for class names
COUNTED_CLASSES = 15  # the matrix shows counts in its cells up to this many classes
MIN_FONT = 5.0  # points; smaller class names cannot be read


def draw_confusion(counts: np.ndarray, names: Sequence[str]) -> Figure:
    """The confusion matrix; each row is normalised by its true class.

    With at most `COUNTED_CLASSES` classes, the cells show the `counts` [true class, predicted class]. The axes show
    class names if these can be read, else class numbers; then the most frequent mistakes are listed beside the matrix.
    """
    with importing("drawing a confusion matrix"):
        from matplotlib.colors import PowerNorm
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

    classes = len(names)
    side = float(np.clip(1.5 + 0.3 * classes, 4.5, 12.0))  # inches
    font = min(9.0, 0.7 * 72 * side / classes)
    named = font >= MIN_FONT
    figure = Figure(figsize=(side + (1.2 if named else 4.5), side), layout="constrained")
    columns = figure.add_gridspec(1, 2, width_ratios=(side, 3.5)) if not named else figure.add_gridspec(1, 1)
    axes = figure.add_subplot(columns[0])
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    # The colour follows the square root of the share: otherwise 2 % would look like 0.
    drawn = axes.imshow(shares, cmap="Blues", norm=PowerNorm(0.5, 0, 1), interpolation="nearest")
    counted = classes <= COUNTED_CLASSES
    shown = "number" if counted else "share"
    axes.set_title(f"{shown} of each true class (row) predicted as each class (column)", fontsize=9)
    axes.set_xlabel("predicted class" if named else "predicted class (numbers as in classes.csv)")
    axes.set_ylabel("true class" if named else "true class (numbers as in classes.csv)")
    if named:
        short = [_label(name, 24) for name in names]
        axes.set_xticks(range(classes), short, rotation=90, fontsize=font)
        axes.set_yticks(range(classes), short, fontsize=font)
    else:
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(nbins=20, integer=True))
        _list_confusions(figure.add_subplot(columns[1]), counts, names)
    if counted:
        for row, column in np.argwhere(counts):
            colour = "white" if shares[row, column] > 0.35 else "black"
            axes.text(column, row, str(counts[row, column]), ha="center", va="center", fontsize=font, color=colour)
    ticks = (0, 0.05, 0.2, 0.5, 1)
    figure.colorbar(drawn, ax=axes, shrink=0.6, pad=0.02, ticks=ticks, label="share of the row")
    return figure


def _list_confusions(axes: Axes, counts: np.ndarray, names: Sequence[str]) -> None:
    """Write the most frequent pairs of true and predicted class into `axes`."""
    wrong = counts - np.diag(np.diag(counts))
    order = np.argsort(-wrong, axis=None, kind="stable")[:SHOWN_CONFUSIONS]
    lines = ["most frequent mistakes", ""]
    for true, predicted in zip(*np.unravel_index(order, wrong.shape), strict=True):
        if wrong[true, predicted]:
            labels = [f"{_label(names[k], 24)} ({k})" for k in (true, predicted)]
            lines.append(f"{wrong[true, predicted]}×  {labels[0]}\n       taken for {labels[1]}")
    axes.axis("off")
    axes.text(0, 1, "\n".join(lines), fontsize=8, va="top", linespacing=1.3, transform=axes.transAxes)


def draw_misclassified(predictions: Predictions, names: Sequence[str]) -> Figure:
    """A sheet of the misclassified images in `predictions`, highest loss first, with the `names` of their classes."""
    with importing("drawing misclassified images"):
        from matplotlib.figure import Figure

    images = predictions.misclassified
    columns = min(6, len(images))
    rows = math.ceil(len(images) / columns)
    figure = Figure(figsize=(max(1.8 * columns, 4.5), 2.1 * rows + 0.4), layout="constrained")
    shown = f"the {len(images)} worst of " if predictions.mistakes > len(images) else ""
    figure.suptitle(f"{shown}{predictions.mistakes} mistakes in {len(predictions.labels)} test images", fontsize=9)
    for position, one in enumerate(images, start=1):
        axes = figure.add_subplot(rows, columns, position)
        axes.imshow(one.image, interpolation="nearest")
        axes.set_axis_off()
        predicted = f"predicted {_label(names[one.predicted], 18)} ({one.confidence:.0%})"
        axes.set_title(f"is {_label(names[one.label], 22)}\n{predicted}", fontsize=6.5)
    return figure


def _label(name: str, length: int) -> str:
    return figure_text(shortened(name, length))


def shortened(text: str, length: int) -> str:
    """`text`, cut to `length` characters with an ellipsis at the end."""
    return text if len(text) <= length else text[: length - 1] + "…"
