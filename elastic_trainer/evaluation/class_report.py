"""How well a model recognises each class: precision, recall, F1 and the confusion matrix, as tables and files.

It shows users who train on their own photos which classes need more or better images.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from elastic_trainer.evaluation.pictures import draw_confusion, draw_misclassified, shortened
from elastic_trainer.evaluation.predictions import Predictions, output_names, predict
from elastic_trainer.evaluation.text_table import text_table
from elastic_trainer.system.files import alone_in, atomic_path, save_figure, write_csv, write_json, writing
from elastic_trainer.system.machine import environment

if TYPE_CHECKING:
    import keras

    from elastic_trainer.datasets.image_data import ImageData
    from elastic_trainer.settings import Evaluation

SHOWN_CLASSES = 20  # rows of the printed table
COLUMNS = ("class", "name", "precision", "recall", "f1", "support", "predicted", "most_taken_for", "times")


@dataclass(frozen=True)
class ClassResult:
    """The result of one class: a row of classes.csv, with `COLUMNS`."""

    index: int
    name: str
    precision: float | None  # 0…1; None if it is 0 divided by 0, as recall and f1
    recall: float | None
    f1: float | None
    support: int  # test images of this class
    predicted: int  # test images that were predicted as this class
    taken_for: str | None  # the wrong class that was predicted most often for images of this class, if any was
    taken_for_count: int


def confusion(predictions: Predictions, classes: int) -> np.ndarray:
    """Counts [true class, predicted class] of a data set of `classes`, up to the highest output that was predicted."""
    outputs = max(int(predictions.predicted.max()) + 1, classes)
    counts = np.zeros((outputs, outputs), int)
    np.add.at(counts, (predictions.labels, predictions.predicted), 1)
    return counts


def class_results(counts: np.ndarray, names: Sequence[str], classes: int) -> list[ClassResult]:
    """The result of each of the data set's `classes`, lowest F1 first; those without (no test image, never predicted)
    come last. `counts`: see `confusion`; `names` are of all outputs."""
    correct, images, predicted = np.diag(counts), counts.sum(axis=1), counts.sum(axis=0)
    wrong = counts - np.diag(correct)
    results = [
        ClassResult(
            k,
            name,
            precision=_ratio(correct[k], predicted[k]),
            recall=_ratio(correct[k], images[k]),
            f1=_ratio(2 * correct[k], predicted[k] + images[k]),
            support=int(images[k]),
            predicted=int(predicted[k]),
            taken_for=names[wrong[k].argmax()] if wrong[k].any() else None,
            taken_for_count=int(wrong[k].max()),
        )
        for k, name in enumerate(names[:classes])
    ]
    return sorted(results, key=lambda result: (result.f1 is None, result.f1 or 0, result.recall or 0, result.index))


def report(evaluation: Evaluation, model: keras.Model, dataset: ImageData) -> str:
    """Test a model, write the files of its evaluation, and return the text to print."""
    start = time.perf_counter()
    predictions = predict(model, dataset)
    record = {
        "model": str(evaluation.model),
        "dataset_name": dataset.name,
        "data_dir": str(evaluation.settings.data_dir) if evaluation.settings.data_dir else None,
        "input_size": dataset.input_size,
        "outputs": model.output_shape[-1],
        "seconds": time.perf_counter() - start,
    }
    return write_report(predictions, dataset.class_names, evaluation.folder / "evaluation", record)


def write_report(predictions: Predictions, class_names: Sequence[str], folder: Path, record: dict[str, Any]) -> str:
    """Write the files of an evaluation and return the text to print.

    Files: classes.csv, confusion.csv, confusion.pdf, confusion.png, mistakes.png (if there are any mistakes) and
    evaluation.json (`record`, the totals and the environment).
    """
    counts = confusion(predictions, len(class_names))
    names = output_names(class_names, len(counts))
    results = class_results(counts, names, len(class_names))
    tested = [result for result in results if result.support]
    record = {
        **record,
        "test_images": len(predictions.labels),
        "mistakes": predictions.mistakes,
        "accuracy": predictions.accuracy,
        "loss": float(predictions.losses.mean()),
        "macro_precision": _mean(result.precision for result in tested),
        "macro_recall": _mean(result.recall for result in tested),
        "macro_f1": _mean(result.f1 for result in tested),
        "classes_without_test_images": len(results) - len(tested),
    }
    with alone_in(folder):
        write_csv(folder / "classes.csv", COLUMNS, map(astuple, results))
        rows = ([name, *row] for name, row in zip(names, counts.tolist(), strict=True))
        write_csv(folder / "confusion.csv", ("true class \\ predicted", *names), rows)
        save_figure(draw_confusion(counts, names), folder / "confusion")
        with writing(folder):
            (folder / "mistakes.png").unlink(missing_ok=True)  # of an earlier evaluation
        if predictions.misclassified:
            with atomic_path(folder / "mistakes.png") as temporary:
                draw_misclassified(predictions, names).savefig(temporary, dpi=150)
        write_json(folder / "evaluation.json", {**record, "environment": environment()})
    totals = (
        f"accuracy {record['accuracy']:.1%} ({record['test_images'] - record['mistakes']} of {record['test_images']}), "
        f"loss {record['loss']:.4f}, mean F1 of the classes {record['macro_f1']:.1%}"
    )
    return "\n".join([totals, *_class_table(results), f"written to {folder}"])


def _ratio(part: int, total: int) -> float | None:
    return float(part / total) if total else None


def _mean(scores: Iterable[float | None]) -> float | None:
    defined = [score for score in scores if score is not None]
    return statistics.fmean(defined) if defined else None


def _class_table(results: Sequence[ClassResult]) -> list[str]:
    rows: list[Sequence[str]] = [("class (worst first)", "precision", "recall", "F1", "images", "most often taken for")]
    for result in results[:SHOWN_CLASSES]:
        scores = ("-" if score is None else f"{score:.1%}" for score in (result.precision, result.recall, result.f1))
        confused = f"{result.taken_for} ({result.taken_for_count})" if result.taken_for else "-"
        rows.append((shortened(result.name, 40), *scores, str(result.support), shortened(confused, 40)))
    lines = text_table(rows, left_aligned=(0, 5))
    if len(results) > SHOWN_CLASSES:
        lines.append(f"… and {len(results) - SHOWN_CLASSES} better classes in classes.csv")
    return lines
