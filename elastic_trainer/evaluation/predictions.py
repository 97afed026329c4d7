"""What a trained model gets right and wrong, class by class: `python main.py --evaluate logs/run`.

The model comes from a .keras file, or is made by a function of the user's and takes its weights from the file. All
images of the test split are asked once; everything that is written follows from the answers.
"""

from __future__ import annotations

import heapq
import time
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
from elastic_trainer.datasets.image_data import ImageData
from elastic_trainer.datasets.sources import count_classes
from elastic_trainer.evaluation.class_report import write_report
from elastic_trainer.networks import pretrained
from elastic_trainer.networks.own_model import with_logits
from elastic_trainer.networks.saved_model import load_model
from elastic_trainer.settings import EMBEDDED, PAPER
from utils import UserError

if TYPE_CHECKING:
    import argparse


SHOWN_MISTAKES = 24  # pictures on the contact sheet


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


def load(args: argparse.Namespace) -> tuple[keras.Model, ImageData]:
    """The model that `--evaluate` names and the data set to ask it about.

    Returns:
        A model from images [batch, size, size, 3] in 0…255 to logits [batch, outputs], and the data at that size.

    Raises:
        UserError: the file holds no model, or one that does not suit the data set or the options.
    """
    classes = count_classes(args.dataset_name, args.data_dir)
    defaults = EMBEDDED if args.dataset_name == "digits" else PAPER
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
        logits = None if outputs is None else with_logits(model, outputs, str(path))(inputs)
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
