"""How well a model recognises each class: precision, recall, F1 and the confusion matrix, as tables and files.

It shows users who train on their own photos which classes need more or better images.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from elastic_trainer.evaluation.pictures import draw_confusion, draw_mistakes, shortened
from elastic_trainer.evaluation.predictions import Predictions, predict
from elastic_trainer.evaluation.text_table import text_table
from elastic_trainer.system.files import atomic_path, save_figure, write_csv, write_json, writing
from elastic_trainer.system.machine import environment

if TYPE_CHECKING:
    import keras

    from elastic_trainer.datasets.image_data import ImageData
    from elastic_trainer.settings import Settings

SHOWN_CLASSES = 20  # rows of the printed table
COLUMNS = ("class", "name", "precision", "recall", "f1", "support", "predicted", "most_taken_for", "times")


class ClassResult(NamedTuple):
    """The result of one class: a row of classes.csv, with `COLUMNS`."""

    number: int
    name: str
    precision: float | None  # 0…1; None if it is 0 divided by 0, as recall and f1
    recall: float | None
    f1: float | None
    support: int  # test images of this class
    predicted: int  # test images that were predicted as this class
    taken_for: str | None  # the wrong class that was predicted most often for images of this class, if any was
    taken_for_count: int


def confusion(predictions: Predictions, classes: int) -> np.ndarray:
    """Counts [true class, predicted class] of a data set of `classes`."""
    counts = np.zeros((classes, classes), int)
    np.add.at(counts, (predictions.labels, predictions.predicted), 1)
    return counts


def class_results(counts: np.ndarray, names: Sequence[str]) -> list[ClassResult]:
    """The result of each class, lowest F1 first; those without (no test image, never predicted) come last.

    `counts`: see `confusion`.
    """
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
        for k, name in enumerate(names)
    ]
    return sorted(results, key=lambda result: (result.f1 is None, result.f1 or 0, result.recall or 0, result.number))


def report(settings: Settings, model: keras.Model, dataset: ImageData, folder: Path) -> str:
    """Test the model of `--evaluate`, write the files of its evaluation, and return the text to print."""
    record = {"model": str(settings.evaluate), "dataset_name": dataset.name, "input_size": dataset.input_size}
    data_dir = settings.data_dir
    record |= {"data_dir": None if data_dir is None else str(data_dir), "outputs": model.output_shape[-1]}
    return write_report(predict(model, dataset), dataset.class_names, folder, record)


def write_report(predictions: Predictions, names: Sequence[str], folder: Path, record: dict[str, Any]) -> str:
    """Write the files of an evaluation and return the text to print.

    Files: classes.csv, confusion.csv, confusion.pdf, confusion.png, mistakes.png (if there are any mistakes) and
    evaluation.json (`record`, the totals and the environment). `names` are those of the classes.
    """
    counts = confusion(predictions, len(names))
    results = class_results(counts, names)
    tested, count = [result for result in results if result.support], len(predictions.labels)
    totals = {
        "test_images": count,
        "mistakes": predictions.mistakes,
        "accuracy": predictions.accuracy,
        "loss": float(predictions.losses.mean()),
        "macro_f1": float(np.mean([result.f1 for result in tested])),
        "classes_without_test_images": len(results) - len(tested),
    }
    write_csv(folder / "classes.csv", COLUMNS, results)
    rows = ([name, *row] for name, row in zip(names, counts.tolist(), strict=True))
    write_csv(folder / "confusion.csv", ("true class \\ predicted", *names), rows)
    save_figure(draw_confusion(counts, names), folder / "confusion")
    with writing(folder):
        (folder / "mistakes.png").unlink(missing_ok=True)  # of an earlier evaluation
    if predictions.worst:
        with atomic_path(folder / "mistakes.png") as temporary:
            draw_mistakes(predictions, names).savefig(temporary, dpi=150)
    write_json(folder / "evaluation.json", {**record, **totals, "environment": environment()})
    line = (
        f"accuracy {totals['accuracy']:.1%} ({count - predictions.mistakes} of {count}), loss {totals['loss']:.4f}, "
        f"mean F1 of the classes {totals['macro_f1']:.1%}"
    )
    return "\n".join([line, *_class_table(results), f"written to {folder}"])


def _ratio(part: int, total: int) -> float | None:
    return float(part / total) if total else None


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
