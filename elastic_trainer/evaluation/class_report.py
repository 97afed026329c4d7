"""What a model gets right and wrong, class by class, as tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import utils
from elastic_trainer.evaluation.pictures import draw_confusion, draw_mistakes
from elastic_trainer.evaluation.predictions import Answers
from elastic_trainer.machine import environment

SHOWN_CLASSES = 20  # rows of the printed table


@dataclass(frozen=True)
class ClassResult:
    """How one class fared; a share is NaN where it is 0 of 0.

    Attributes:
        support: test images of this class.
        predicted: test images taken for it.
        taken_for, taken_for_count: the wrong class its images were taken for most often, None if never; how often.
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


def all_names(answers: Answers, class_names: Sequence[str]) -> list[str]:
    """`class_names`, continued by numbers as far as the model has named outputs that are no class of the data set."""
    highest = int(max(answers.predictions.max(), len(class_names) - 1))
    return [*class_names, *(f"output {k}" for k in range(len(class_names), highest + 1))]


def confusion(answers: Answers, class_names: Sequence[str]) -> np.ndarray:
    """Counts [true class, predicted class], as far as `all_names` goes."""
    from sklearn.metrics import confusion_matrix

    names = all_names(answers, class_names)
    return confusion_matrix(answers.labels, answers.predictions, labels=range(len(names)))


def class_results(answers: Answers, class_names: Sequence[str]) -> list[ClassResult]:
    """Every class of the data set, the worst F1 first; classes that no image is of, nor was taken for, last."""
    from sklearn.metrics import precision_recall_fscore_support

    names, counts = all_names(answers, class_names), confusion(answers, class_names)
    shares = precision_recall_fscore_support(
        answers.labels, answers.predictions, labels=range(len(names)), zero_division=np.nan
    )
    wrong = counts - np.diag(np.diag(counts))
    results = []
    for k, (precision, recall, f1, support) in enumerate(zip(*shares, strict=True)):
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


def write_report(answers: Answers, class_names: Sequence[str], folder: Path, record: dict[str, Any]) -> str:
    """Write all files of an evaluation to `folder`, and return what is to be printed.

    classes.csv, confusion.csv, confusion.pdf, confusion.png, mistakes.png (if there are any), and evaluation.json,
    which holds `record` and the totals.
    """
    results, counts = class_results(answers, class_names), confusion(answers, class_names)
    names = all_names(answers, class_names)
    rows = [
        (
            *(r.index, r.name),
            *map(_cell, (r.precision, r.recall, r.f1)),
            *(r.support, r.predicted, r.taken_for or "", r.taken_for_count),
        )
        for r in results
    ]
    columns = ("class", "name", "precision", "recall", "f1", "support", "predicted", "most_taken_for", "times")
    utils.write_csv(folder / "classes.csv", columns, rows)
    utils.write_csv(
        folder / "confusion.csv",
        ("true class \\ predicted", *names),
        ((name, *map(int, row)) for name, row in zip(names, counts, strict=True)),
    )
    utils.save_figure(draw_confusion(counts, names), folder / "confusion")
    with utils.writing(folder):
        (folder / "mistakes.png").unlink(missing_ok=True)  # of an evaluation before
    if answers.mistakes:
        with utils.atomic_path(folder / "mistakes.png") as temporary:
            draw_mistakes(answers, names).savefig(temporary, dpi=150)
    seen = [result for result in results if result.support]
    means = {f"macro_{key}": _mean([getattr(r, key) for r in seen]) for key in ("precision", "recall", "f1")}
    totals = {
        "test_images": len(answers.labels),
        "mistakes": int((answers.labels != answers.predictions).sum()),
        "accuracy": answers.accuracy,
        "loss": float(answers.losses.mean()),
        **means,
    }
    record = {**record, **totals, "classes_without_test_images": len(results) - len(seen)}
    utils.write_json(folder / "evaluation.json", {**record, "environment": environment()})
    return "\n".join([_totals_line(record), *_class_table(results), f"written to {folder}"])


def _cell(share: float) -> float | str:
    return "" if math.isnan(share) else share


def _mean(shares: Sequence[float]) -> float | None:
    """Mean of the shares that are defined, or None."""
    defined = [share for share in shares if not math.isnan(share)]
    return math.fsum(defined) / len(defined) if defined else None


def _totals_line(record: dict[str, Any]) -> str:
    right = record["test_images"] - record["mistakes"]
    return (
        f"accuracy {record['accuracy']:.1%} ({right} of {record['test_images']}), loss {record['loss']:.4f}, "
        f"mean F1 of the classes {record['macro_f1']:.1%}"
    )


def _class_table(results: Sequence[ClassResult]) -> list[str]:
    shown = results[:SHOWN_CLASSES]
    header = ("class (worst first)", "precision", "recall", "F1", "images", "most often taken for")
    rows: list[tuple[str, ...]] = [header]
    for r in shown:
        shares = ("-" if math.isnan(share) else f"{share:.1%}" for share in (r.precision, r.recall, r.f1))
        confused = f"{r.taken_for} ({r.taken_for_count})" if r.taken_for else "-"
        rows.append((shortened(r.name, 40), *shares, str(r.support), shortened(confused, 40)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    left = (0, len(header) - 1)
    lines = [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    if len(results) > len(shown):
        lines.append(f"… and {len(results) - len(shown)} better classes in classes.csv")
    return lines


def shortened(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
