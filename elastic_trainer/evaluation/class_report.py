"""How well a model recognises each class: precision, recall, F1 and the confusion matrix, as tables and files.

The paper reports accuracy only. This report is for users who train on their own photos and want to see which classes
need more or better images.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from elastic_trainer.evaluation.pictures import draw_confusion, draw_misclassified, shortened
from elastic_trainer.evaluation.predictions import Predictions
from elastic_trainer.files import atomic_path, save_figure, write_csv, write_json, writing
from elastic_trainer.machine import environment

SHOWN_CLASSES = 20  # rows of the printed table


@dataclass(frozen=True)
class ClassResult:
    """The result of one class; a score is NaN if it is 0 divided by 0.

    Attributes:
        index, name: of the class.
        precision, recall, f1: 0…1.
        support: number of test images of this class.
        predicted: number of test images that were predicted as this class.
        taken_for, taken_for_count: the wrong class that was predicted most often for images of this class (None if no
            image was misclassified), and how often.
    """

    index: int
    name: str
    precision: float
    recall: float
    f1: float
    support: int
    predicted: int
    taken_for: str | None
    taken_for_count: int


def output_names(predictions: Predictions, class_names: Sequence[str]) -> list[str]:
    """`class_names`, followed by "output k" up to the highest predicted output beyond the classes of the data set."""
    highest = int(max(predictions.predicted.max(), len(class_names) - 1))
    return [*class_names, *(f"output {k}" for k in range(len(class_names), highest + 1))]


def confusion(predictions: Predictions, class_names: Sequence[str]) -> np.ndarray:
    """Counts [true class, predicted class]; rows and columns are those of `output_names`."""
    from sklearn.metrics import confusion_matrix

    names = output_names(predictions, class_names)
    return confusion_matrix(predictions.labels, predictions.predicted, labels=range(len(names)))


def class_results(predictions: Predictions, class_names: Sequence[str]) -> list[ClassResult]:
    """The result of each class of the data set, lowest F1 first.

    Classes without an F1 (no test image, never predicted) come last.
    """
    from sklearn.metrics import precision_recall_fscore_support

    names, counts = output_names(predictions, class_names), confusion(predictions, class_names)
    scores = precision_recall_fscore_support(
        predictions.labels, predictions.predicted, labels=range(len(names)), zero_division=np.nan
    )
    wrong = counts - np.diag(np.diag(counts))
    results = []
    for k, (precision, recall, f1, support) in enumerate(zip(*scores, strict=True)):
        if k >= len(class_names):
            break
        other, times = int(wrong[k].argmax()), int(wrong[k].max())
        results.append(
            ClassResult(
                k,
                names[k],
                float(precision),
                float(recall),
                float(f1),
                int(support),
                int(counts[:, k].sum()),
                names[other] if times else None,
                times,
            )
        )
    return sorted(results, key=lambda result: (math.isnan(result.f1), result.f1, result.recall, result.index))


def write_report(predictions: Predictions, class_names: Sequence[str], folder: Path, record: dict[str, Any]) -> str:
    """Write the files of an evaluation and return the text to print.

    Files: classes.csv, confusion.csv, confusion.pdf, confusion.png, mistakes.png (if there are any mistakes) and
    evaluation.json (`record`, the totals and the environment).

    Raises:
        UserError: a file cannot be written.
    """
    results, counts = class_results(predictions, class_names), confusion(predictions, class_names)
    names = output_names(predictions, class_names)
    _write_tables(results, counts, names, folder)
    save_figure(draw_confusion(counts, names), folder / "confusion")
    with writing(folder):
        (folder / "mistakes.png").unlink(missing_ok=True)  # of an earlier evaluation
    if predictions.misclassified:
        with atomic_path(folder / "mistakes.png") as temporary:
            draw_misclassified(predictions, names).savefig(temporary, dpi=150)
    tested = [result for result in results if result.support]
    means = {f"macro_{key}": _mean([getattr(r, key) for r in tested]) for key in ("precision", "recall", "f1")}
    totals = {
        "test_images": len(predictions.labels),
        "mistakes": predictions.mistakes,
        "accuracy": predictions.accuracy,
        "loss": float(predictions.losses.mean()),
        **means,
    }
    record = {**record, **totals, "classes_without_test_images": len(results) - len(tested)}
    write_json(folder / "evaluation.json", {**record, "environment": environment()})
    return "\n".join([_totals_line(record), *_class_table(results), f"written to {folder}"])


def _write_tables(results: Sequence[ClassResult], counts: np.ndarray, names: Sequence[str], folder: Path) -> None:
    """Write classes.csv and confusion.csv."""
    rows = [
        (
            *(r.index, r.name),
            *map(_cell, (r.precision, r.recall, r.f1)),
            *(r.support, r.predicted, r.taken_for or "", r.taken_for_count),
        )
        for r in results
    ]
    columns = ("class", "name", "precision", "recall", "f1", "support", "predicted", "most_taken_for", "times")
    write_csv(folder / "classes.csv", columns, rows)
    write_csv(
        folder / "confusion.csv",
        ("true class \\ predicted", *names),
        ((name, *map(int, row)) for name, row in zip(names, counts, strict=True)),
    )


def _cell(score: float) -> float | str:
    return "" if math.isnan(score) else score


def _mean(scores: Sequence[float]) -> float | None:
    """Mean of the scores that are not NaN, or None if all are."""
    defined = [score for score in scores if not math.isnan(score)]
    return math.fsum(defined) / len(defined) if defined else None


def _totals_line(record: dict[str, Any]) -> str:
    correct = record["test_images"] - record["mistakes"]
    return (
        f"accuracy {record['accuracy']:.1%} ({correct} of {record['test_images']}), loss {record['loss']:.4f}, "
        f"mean F1 of the classes {record['macro_f1']:.1%}"
    )


def _class_table(results: Sequence[ClassResult]) -> list[str]:
    """The lines of the printed table: a header and at most `SHOWN_CLASSES` classes."""
    shown = results[:SHOWN_CLASSES]
    header = ("class (worst first)", "precision", "recall", "F1", "images", "most often taken for")
    rows: list[tuple[str, ...]] = [header]
    for r in shown:
        scores = ("-" if math.isnan(score) else f"{score:.1%}" for score in (r.precision, r.recall, r.f1))
        confused = f"{r.taken_for} ({r.taken_for_count})" if r.taken_for else "-"
        rows.append((shortened(r.name, 40), *scores, str(r.support), shortened(confused, 40)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    left_aligned = (0, len(header) - 1)
    lines = [
        "  ".join(
            cell.ljust(width) if i in left_aligned else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    if len(results) > len(shown):
        lines.append(f"… and {len(results) - len(shown)} better classes in classes.csv")
    return lines
