"""Pictures of an evaluation: the confusion matrix, and a sheet of misclassified images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from elastic_trainer.evaluation.predictions import Predictions
from elastic_trainer.system.errors import figure_text, importing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COUNTED_CLASSES = 15  # the matrix shows counts in its cells up to this many classes


def draw_confusion(counts: np.ndarray, names: Sequence[str]) -> Figure:
    """The confusion matrix; each row is normalised by its true class.

    With at most `COUNTED_CLASSES` classes, the cells show the `counts` [true class, predicted class]. Names of many
    classes can be read in the PDF alone.
    """
    with importing("drawing a confusion matrix"):
        from matplotlib.colors import PowerNorm
        from matplotlib.figure import Figure

    classes = len(names)
    side = float(np.clip(1.5 + 0.3 * classes, 4.5, 12.0))  # inches
    font = min(9.0, 0.7 * 72 * side / classes)
    figure = Figure(figsize=(side + 1.2, side), layout="constrained")
    axes = figure.add_subplot()
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    # The colour follows the square root of the share: otherwise 2 % would look like 0.
    drawn = axes.imshow(shares, cmap="Blues", norm=PowerNorm(0.5, 0, 1), interpolation="nearest")
    counted = classes <= COUNTED_CLASSES
    shown = "number" if counted else "share"
    axes.set_title(f"{shown} of each true class (row) predicted as each class (column)", fontsize=9)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")
    short = [_label(name, 24) for name in names]
    axes.set_xticks(range(classes), short, rotation=90, fontsize=font)
    axes.set_yticks(range(classes), short, fontsize=font)
    if counted:
        for row, column in np.argwhere(counts):
            colour = "white" if shares[row, column] > 0.35 else "black"
            axes.text(column, row, str(counts[row, column]), ha="center", va="center", fontsize=font, color=colour)
    figure.colorbar(drawn, ax=axes, shrink=0.6, pad=0.02, ticks=(0, 0.05, 0.2, 0.5, 1), label="share of the row")
    return figure


def draw_mistakes(predictions: Predictions, names: Sequence[str]) -> Figure:
    """A sheet of the worst mistakes in `predictions`, highest loss first, with the `names` of their classes."""
    with importing("drawing misclassified images"):
        from matplotlib.figure import Figure

    count, mistakes = len(predictions.worst), predictions.mistakes
    columns = min(6, count)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(max(1.8 * columns, 4.5), 2.1 * rows + 0.4), layout="constrained")
    shown = f"the {count} worst of " if mistakes > count else ""
    figure.suptitle(f"{shown}{mistakes} mistakes in {len(predictions.labels)} test images", fontsize=9)
    for position, (number, image) in enumerate(predictions.worst.items(), start=1):
        axes = figure.add_subplot(rows, columns, position)
        axes.imshow(image, interpolation="nearest")
        axes.set_axis_off()
        label, predicted = (_label(names[each[number]], 20) for each in (predictions.labels, predictions.predicted))
        axes.set_title(f"is {label}\npredicted {predicted} ({predictions.confidences[number]:.0%})", fontsize=6.5)
    return figure


def _label(name: str, length: int) -> str:
    return figure_text(shortened(name, length))


def shortened(text: str, length: int) -> str:
    """`text`, cut to `length` characters with an ellipsis at the end."""
    return text if len(text) <= length else text[: length - 1] + "…"
