#!/usr/bin/env python
"""The demo: a network that knows printed digits comes to a device whose owner writes by hand.

Test accuracy of five ways to go on, over time: leave the network as it comes, give it a new head in closed form, train
the tensors that the paper's method selects, train its upper part, or train all of it, all by the same recipe. Prints a
table; writes figures/demo.pdf, .png and .csv, with a map of what the paper's method selected.

    python scripts/figures/demo.py --seed 0
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import plotting  # first: it sets the import path

import utils
from elastic_trainer.cli.commands import parse_training
from elastic_trainer.evaluation.text_table import text_table
from elastic_trainer.settings import PRESETS
from elastic_trainer.settings.flags import OneLineParser, whole_number
from elastic_trainer.settings.network_names import GLYPH_HEAD
from elastic_trainer.system.machine import load_tensorflow

BEFORE, HEAD = "as_it_comes", "closed_form_head"
ELASTIC, UPPER_PART, FULL = "elastic_training", "elastic_training_upper_part", "full_training"
# Settings of each training besides FLAGS. The paper selects every 3 of 12 epochs, without cached features or fillers.
EPOCHS = PRESETS["paper"].num_epochs
PAPERS = {"num_epochs": EPOCHS, "interval": PRESETS["paper"].interval, "feature_cache": "off", "has_fillers": False}
TRAININGS: dict[str, dict[str, Any]] = {
    ELASTIC: PAPERS,
    UPPER_PART: {"num_epochs": 10, "interval": 10},
    FULL: {"num_epochs": 24},
}
FLAGS = "--dataset_name digits --preset photos --input_size 64 --batch_size 32 --learning_rate 0.02 --augment none"
LABELS = {
    BEFORE: "as it comes: knows printed digits",
    HEAD: "new head alone, in closed form",
    ELASTIC: "ElasticTrainer, the paper: importance and dynamic program, ρ = 0.5",
    UPPER_PART: "ElasticTrainer, upper part, ρ = 0.5",
    FULL: "full training",
}
PHOTOS = """
On photos, ElasticTrainer was 0.3 to 1.1 points better than full training in a third of its time (docs/results.md).
Put yours into photos/<class>/*.jpg; in five minutes, this makes a model of them for TensorFlow Lite:

    .venv/bin/python main.py --dataset_name image_folder --data_dir photos --deadline 5m --run_name mine --export tflite
"""
Points = Sequence[tuple[float, float]]  # seconds, test accuracy in %
Selections = Sequence[tuple[float, np.ndarray]]  # epoch, bool [tensors]


def main() -> None:
    parser = OneLineParser(prog="demo.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=whole_number(0, 2**31 - 1), default=0, metavar="N", help="default: %(default)s")
    found, selections = measure(parser.parse_args().seed)
    total = found[FULL][-1][0]
    rows = [
        [LABELS[name], f"{percent:.1f} %", f"{seconds:.1f}", f"{seconds / total:.2f}"]
        for name, (*_, (seconds, percent)) in found.items()
    ]
    print("", *text_table([["", "test accuracy", "seconds", "of full training"], *rows]), sep="\n")
    print(comparison(found))
    draw(found, selections)
    print(PHOTOS)


def comparison(found: Mapping[str, Points]) -> str:
    """Which of the two elastic trainings ended with the higher accuracy, in a line."""
    (seconds, percent), (upper_seconds, upper_percent) = found[ELASTIC][-1], found[UPPER_PART][-1]
    difference = round(percent - upper_percent, 1)
    if difference == 0:
        words = "ends level with the upper part"
    else:
        words = f"ends {abs(difference):.1f} points {'above' if difference > 0 else 'below'} the upper part"
    return f"The paper's selection {words}, after {seconds / upper_seconds:.1f} times its time, selecting included."


def measure(seed: int) -> tuple[dict[str, Points], Selections]:
    """The points of each way to go on, by the names of `LABELS`, and what the paper's method selected."""
    load_tensorflow()
    from demo_curve import Curve

    import data
    import models
    from elastic_trainer.engine.closed_form_head import closed_form_head
    from elastic_trainer.engine.features import Evaluation
    from elastic_trainer.engine.task import ImageClassification
    from elastic_trainer.profiling.measuring import idle_training
    from elastic_trainer.profiling.tables import estimated_table
    from elastic_trainer.runs.progress import ProgressBar
    from elastic_trainer.runs.trainer import Trainer

    def tested() -> float:
        return 100 * evaluation(digits.test())["accuracy"]

    settings = replace(parse_training([*FLAGS.split(), "--seed", f"{seed}"]), num_classes=10)
    digits = data.load(settings)
    model, printed = models.build(settings), np.load(GLYPH_HEAD)
    model.get_layer("head").set_weights([printed["kernel"], printed["bias"]])
    task, weights = ImageClassification(model), model.get_weights()
    evaluation = Evaluation(task)
    found: dict[str, Points] = {BEFORE: [(0.0, tested())]}

    print("1/3 a new head in closed form: one forward pass, no training")
    start = time.perf_counter()
    head = closed_form_head(task, digits)
    assert head is not None
    head.assign()
    fitted = time.perf_counter() - start
    found[HEAD] = [(fitted, tested())]

    print("2/3 what does each tensor cost to train here? By FLOPs and bytes, until steps are timed (or by profiler.py)")
    idle = idle_training(model, settings)
    table = estimated_table(idle.task, idle.optimizer, settings.batch_size)

    print("3/3 the paper's elastic training, then the upper part, then full training")
    chosen: dict[str, Selections] = {}
    for train_type, flags in TRAININGS.items():
        model.set_weights(weights)
        curve = Curve(fitted if train_type == UPPER_PART else 0.0, found[BEFORE][0][1])
        asked = replace(settings, rho=PRESETS["paper"].rho, validation_share=0.0, **flags)
        trainer = Trainer(task, digits, train_type, asked, [curve, ProgressBar()], table=table)
        trainer.run()
        chosen[train_type] = [(selection.epoch, selection.mask) for selection in trainer.history.selections]
        counts = ", ".join(f"{mask.sum()}" for _, mask in chosen[train_type])
        print(f"{LABELS[train_type]}: {counts} of {len(table.names)} tensors trained")
        found[train_type] = curve.points
    return found, chosen[ELASTIC]


def draw(found: Mapping[str, Points], selections: Selections) -> None:
    """The trainings as curves, the others as lines from their time on; beside them, the map of `selections`."""
    title = "printed digits known, handwritten digits learned: MobileNetV2 ×0.35, 64 px, batch 32"
    sheet = plotting.Sheet(plotting.ROOT / "figures" / "demo")
    figure = sheet.figure(plotting.PAGE, 3.5, title)
    axes, beside = figure.subplots(1, 2, width_ratios=(3, 1))
    axes.set(xlabel="training (s)", ylabel="test accuracy (%)")
    epochs, masks = zip(*selections, strict=True)
    plotting.draw_map(beside, [*epochs, EPOCHS], np.array(masks))
    beside.set(xlabel="epoch", ylabel="tensor (0 is next to the input)", title="what the paper's method trains")
    beside.set_xticks(range(0, EPOCHS + 1, 3))  # the interval
    for name, points in found.items():
        look, is_curve = plotting.look_of(name), len(points) > 1
        line = points if is_curve else [*points, (found[FULL][-1][0], points[0][1])]
        style: dict[str, Any] = {"marker": look.marker} if is_curve else {"ls": ":"}
        colour = "black" if name == BEFORE else look.colour
        axes.plot(*zip(*line, strict=True), color=colour, label=LABELS[name], **style)
    axes.set_xlim(left=0)
    rows = [
        {"scheme": name, "seconds": seconds, "test_accuracy_percent": percent}
        for name, points in found.items()
        for seconds, percent in points
    ]
    sheet.save(figure, rows, columns=1)


if __name__ == "__main__":
    utils.run_cli(main)
