"""What a trained model gets right and wrong, class by class: `python main.py --evaluate logs/run`.

The model comes from a .keras file, or is made by a function of the user's and takes its weights from the file. All
images of the test split are asked once; everything that is written follows from the answers.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf
from tqdm import tqdm

import data
import models
import utils
from data import ImageData
from elastic_trainer.cli import options
from elastic_trainer.datasets.sources import count_classes
from elastic_trainer.networks import pretrained
from elastic_trainer.networks.batch_norm import load_model
from utils import UserError

if TYPE_CHECKING:
    import argparse

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN_CLASSES = 20  # rows of the printed table
SHOWN_MISTAKES = 24  # pictures on the contact sheet
SHOWN_CONFUSIONS = 30  # pairs named beside a confusion matrix whose axes have no room for names
COUNTED_CLASSES = 15  # up to so many, the matrix shows numbers in its cells
SMALLEST_FONT = 5.0  # points; smaller names are no names


@dataclass(order=True)
class Mistake:
    """An image that got a wrong answer; the order is by loss."""

    loss: float
    index: int
    label: int
    prediction: int
    confidence: float
    image: np.ndarray  # uint8 [size, size, 3]


@dataclass
class Answers:
    """What a model says to the test images.

    Attributes:
        labels, predictions: class of each image, int [images].
        losses: cross-entropy of each image, [images].
        mistakes: the worst ones, the worst first.
    """

    labels: np.ndarray
    predictions: np.ndarray
    losses: np.ndarray
    mistakes: list[Mistake]

    @property
    def accuracy(self) -> float:
        """Share of right answers, 0…1."""
        return float(np.mean(self.labels == self.predictions))


def from_options(args: argparse.Namespace) -> tuple[keras.Model, ImageData]:
    """Evaluate as the options of `options.parse_main` with `--evaluate` say; returns what was evaluated on what."""
    model, dataset = load(args)
    print(f"{args.evaluate} on {dataset.name}: {dataset.test_count} test images, {dataset.num_classes} classes")
    begin = time.perf_counter()
    answers = ask(model, dataset)
    record = {
        "model": str(args.evaluate),
        "dataset_name": dataset.name,
        "data_dir": str(args.data_dir) if args.data_dir else None,
        "input_size": dataset.input_size,
        "outputs": model.output_shape[-1],
        "seconds": time.perf_counter() - begin,
    }
    print(write_report(answers, dataset.class_names, args.folder / "evaluation", record))
    return model, dataset


# --- the model --------------------------------------------------------------------------------------------------------


def load(args: argparse.Namespace) -> tuple[keras.Model, ImageData]:
    """The model that `--evaluate` names and the data set to ask it about.

    Returns:
        A model from images [batch, size, size, 3] in 0…255 to logits [batch, outputs], and the data at that size.

    Raises:
        UserError: the file holds no model, or one that does not suit the data set or the options.
    """
    classes = count_classes(args.dataset_name, args.data_dir)
    defaults = options.EMBEDDED if args.dataset_name == "digits" else options.PAPER
    if args.model_name is not None:
        size = args.input_size or defaults["input_size"]
        model = models.build_model(args.model_name, size, args.num_classes or classes, augment=args.augment)
        pretrained.load_saved(model, args.evaluate, "--evaluate", f"the network of --model_name {args.model_name}")
    else:
        model = load_model(args.evaluate, "--evaluate")
        size = _input_size(model, args.input_size, args.evaluate) or defaults["input_size"]
    model = _with_outputs(model, size, classes, args)
    return model, data.from_options(args, size)


def _input_size(model: keras.Model, asked: int | None, path: Path) -> int | None:
    """Height and width of the model's images; `asked` where it takes any, and None where nobody says."""
    try:
        shape = model.input_shape
    except AttributeError:  # a model of the user's class that knows none
        return asked
    if not isinstance(shape, tuple) or len(shape) != 4 or shape[3] not in (3, None):
        raise UserError(f"--evaluate {path}: takes {shape}, not RGB images [batch, height, width, 3]")
    own = {size for size in shape[1:3] if size is not None}
    if len(own) > 1:
        raise UserError(f"--evaluate {path}: takes images of {shape[1]}×{shape[2]}, but only square ones can be given")
    if asked is not None and own - {asked}:
        raise UserError(
            f"--input_size {asked}: {path} takes images of {own.pop()} pixels; give that or leave --input_size out"
        )
    return next(iter(own), asked)


def _with_outputs(model: keras.Model, size: int, classes: int, args: argparse.Namespace) -> keras.Model:
    """`model` on images of one size, returning logits; checked against the number of classes."""
    path = args.evaluate
    inputs = keras.Input((size, size, 3), name="image")
    try:
        shape: tuple[int | None, ...] = getattr(model(inputs), "shape", ())
        outputs = shape[1] if len(shape) == 2 else None
        logits = None if outputs is None else models.with_logits(model, outputs, str(path))(inputs)
    except Exception as error:  # whatever a user's layers raise
        raise UserError(
            f"--evaluate {path}: does not take images of {size}×{size} ({utils.first_line(error)}); see --input_size"
        ) from error
    if outputs is None:
        raise UserError(f"--evaluate {path}: returns {shape or 'several outputs'}, not a number for each class")
    if outputs != (args.num_classes or classes) or outputs < classes:
        meant = args.num_classes if args.num_classes and args.num_classes != outputs else None
        flag = f"--num_classes {meant}" if meant else f"--dataset_name {args.dataset_name}"
        hint = f"; give --num_classes {outputs} if it has more outputs on purpose" if outputs > classes else ""
        raise UserError(
            f"{flag}: {path} tells {outputs} classes apart, {args.dataset_name} has {classes}; "
            f"name the data set it was trained for{hint}"
        )
    return keras.Model(inputs, logits, name=model.name)


def forward_function(model: keras.Model, batch_size: int | None) -> Any:
    """The compiled inference pass: images float32 [batch, size, size, 3] -> logits [batch, outputs]."""

    def forward(images: tf.Tensor) -> tf.Tensor:
        return model(images, training=False)

    return tf.function(forward, input_signature=[tf.TensorSpec((batch_size, *model.input_shape[1:]), tf.float32)])


# --- answers ----------------------------------------------------------------------------------------------------------


def ask(model: keras.Model, dataset: ImageData, kept_mistakes: int = SHOWN_MISTAKES) -> Answers:
    """The answers of `model` to all test images of `dataset`, with a progress bar.

    Raises:
        UserError: the model returns something that is not a finite number.
    """
    forward = forward_function(model, None)
    labels_seen: list[np.ndarray] = []
    predictions_seen: list[np.ndarray] = []
    losses_seen: list[np.ndarray] = []
    worst: list[Mistake] = []
    with tqdm(total=dataset.test_count, unit="image", dynamic_ncols=True, desc="testing") as bar:
        for images, labels in dataset.test():
            logits = forward(images)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits).numpy()
            if not np.isfinite(losses).all():
                raise UserError("--evaluate: the model returns numbers that are not finite; its training went astray")
            confidences = tf.reduce_max(tf.nn.softmax(logits), axis=-1).numpy()
            predictions = tf.argmax(logits, axis=-1).numpy()
            for k in np.flatnonzero(predictions != labels.numpy()):
                if len(worst) == kept_mistakes and losses[k] <= worst[0].loss:
                    continue
                image = np.clip(np.round(images[k].numpy()), 0, 255).astype(np.uint8)
                index = bar.n + int(k)
                mistake = Mistake(
                    float(losses[k]), index, int(labels[k]), int(predictions[k]), float(confidences[k]), image
                )
                (heapq.heappushpop if len(worst) == kept_mistakes else heapq.heappush)(worst, mistake)
            labels_seen.append(labels.numpy())
            predictions_seen.append(predictions)
            losses_seen.append(losses)
            bar.update(len(predictions))
    return Answers(
        np.concatenate(labels_seen),
        np.concatenate(predictions_seen),
        np.concatenate(losses_seen),
        sorted(worst, reverse=True),
    )


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


# --- what is written --------------------------------------------------------------------------------------------------


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
    utils.write_json(folder / "evaluation.json", {**record, "environment": utils.environment()})
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
        rows.append((_shortened(r.name, 40), *shares, str(r.support), _shortened(confused, 40)))
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


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


# --- pictures ---------------------------------------------------------------------------------------------------------


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
        short = [_shortened(name, 24) for name in names]
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
            told = [f"{_shortened(names[k], 24)} ({k})" for k in (true, predicted)]
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
        said = f"said {_shortened(names[mistake.prediction], 18)} ({mistake.confidence:.0%})"
        axes.set_title(f"is {_shortened(names[mistake.label], 22)}\n{said}", fontsize=6.5)
    return figure
