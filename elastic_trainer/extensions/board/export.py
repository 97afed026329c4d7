"""Writes the folder from which a board trains without TensorFlow: `main.py --export train_tflite`.

train.tflite       the signatures of `board.signatures`
inference.tflite   one image -> logits; the board writes its weights into a copy of it
board.json         what they contain: classes, recipe, selections, variables, places of the arrays
board_train.py     trains; needs NumPy, Pillow, ai-edge-litert and the other board_*.py beside it
start.keras        the network with the weights that training starts from, for `main.py --load_board`
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

import keras
import numpy as np

from elastic_trainer.cli.commands import EvaluateCommand, TrainCommand
from elastic_trainer.cli.train_command import parse_training
from elastic_trainer.datasets import digests
from elastic_trainer.datasets.image_data import ImageData, trained_images
from elastic_trainer.datasets.image_folder import TEST_FRACTION
from elastic_trainer.errors import UserError
from elastic_trainer.extensions.board.inference_file import inference_file
from elastic_trainer.extensions.board.needs import needs_line
from elastic_trainer.extensions.board.signatures import StepFunctions, TrainingFile, converted_function, suffixed
from elastic_trainer.files import alone_in, atomic_path, existing_parent, write_json
from elastic_trainer.machine import environment
from elastic_trainer.networks.saved_model import save_model
from elastic_trainer.networks.tensors import tensor_names
from elastic_trainer.registry import SCHEMES
from elastic_trainer.runs.reader import is_finished, read_config, read_run
from elastic_trainer.selection.budget import TimeBudget, make_budget
from elastic_trainer.selection.schemes import SchemeContext
from elastic_trainer.settings import RunSettings, Settings
from elastic_trainer.task import ImageClassification
from elastic_trainer.timing.table import TimingTable
from elastic_trainer.trainer import Trainer
from elastic_trainer.training.optimizers import optimizer_of

TRAINING, INFERENCE, RECORD, START = "train.tflite", "inference.tflite", "board.json", "start.keras"
SCRIPTS = Path(__file__).resolve().parents[3] / "scripts" / "board"
SCRIPT, DIGESTS = "board_train.py", "board_digests.py"  # the one to start; a copy of `datasets.digests`
MAX_PART = 8  # images at a time: parts of 4 take 15 % more time, parts of 16 20 MB more (MobileNetV2 0.35, 160 px)
FORMAT = 1  # of board.json
RECIPE = ("num_epochs", "learning_rate", "warmup", "validation_share")


def board_folder(run: RunSettings) -> Path:
    """The folder of a run's export for a board."""
    return run.logdir / f"{run.run_name}_board"


def check_export(run: RunSettings) -> None:
    """Raise `UserError` as `check_folder` for a run's export for a board."""
    check_folder(board_folder(run))


def check_folder(folder: Path) -> list[Path]:
    """The scripts for a board. Raises `UserError` if there are none, or `folder` has an export or is read-only."""
    scripts = [*SCRIPTS.glob("board_*.py")]
    if not scripts:
        raise UserError("--export train_tflite: works only in a checkout, which has scripts/board")
    if (folder / RECORD).exists():
        raise UserError(f"--export train_tflite: {folder} has an export already; move or remove it")
    if not os.access(existing_parent(folder), os.W_OK):
        raise UserError(f"--export train_tflite: {existing_parent(folder)} cannot be written to")
    return scripts


def export_for_board(
    command: TrainCommand | EvaluateCommand, model: keras.Model, dataset: ImageData, table: TimingTable | None = None
) -> str:
    """Export what a run would train first, or what a finished one trained last. Returns the text to print.

    Args:
        command: the run, or the evaluation of a finished one.
        model, dataset: of it.
        table: timing table of the run, if its scheme is elastic.

    Raises:
        UserError: the run to evaluate is not finished, or does what a board cannot do.
    """
    if isinstance(command, EvaluateCommand):
        return _export_last_selection(command, model, dataset)
    return _export_first_selections(command, model, dataset, table)


def _export_first_selections(
    command: TrainCommand, model: keras.Model, dataset: ImageData, table: TimingTable | None
) -> str:
    """Export what the run would train first, at its rho and at those of `--export_rho`. Returns the text to print."""
    settings, masks = command.training, {}
    for rho in (settings.rho, *(command.options["export_rho"] or ())):
        own, budget = replace(settings, rho=rho), None
        if table is not None:
            budget = make_budget(model, dataset, own, table)
        name = command.train_type if table is None else f"rho{rho:g}"
        masks[name] = _first_mask(command.train_type, model, dataset, own, budget)
    count = dataset.train_count + dataset.test_count + (dataset.held_out.test_count if dataset.held_out else 0)
    return _exported(command, masks, model, dataset, board_folder(command.run), count)


def _export_last_selection(command: EvaluateCommand, model: keras.Model, dataset: ImageData) -> str:
    """Export what a finished run trained last, with its best weights. Returns the text to print."""
    folder = command.model.parent
    if not is_finished(folder):
        raise UserError(f"--evaluate {command.model}: --export {command.export} needs the folder of a finished run")
    run = parse_training(["--resume", str(folder)]).with_choices_of(read_config(folder))
    if run.data.augment == "flip_rotate" or run.network.mixed_precision or run.training.max_steps is not None:
        raise UserError(
            f"--evaluate {folder}: the run has --augment flip_rotate, --mixed_precision or --max_steps, which a board "
            "does not have; export a run without them"
        )
    masks = {"last": read_run(folder).selections().chosen[-1]}
    count = len(trained_images(command.model)) + dataset.test_count
    return _exported(run, masks, model, dataset, folder / "board", count)


def _first_mask(
    train_type: str, model: keras.Model, data: ImageData, settings: Settings, budget: TimeBudget | None
) -> np.ndarray:
    """What a run of this scheme would train first: bool [N]. Raises `UserError` if a board cannot train that."""
    entry, task = SCHEMES[train_type], ImageClassification(model)
    if not entry.takes("micro_batch"):  # as a board trains
        raise UserError(f"--export train_tflite: cannot be combined with --train_type {train_type}; give another")
    scheme = entry.make(SchemeContext(task, data, settings, budget))
    trainer = Trainer(task, data, scheme, settings)
    possible = trainer.training.features.are_possible
    return trainer.scheme.select(trainer.history.progress(trainer.schedule, possible), trainer.training).mask


def _exported(
    command: TrainCommand,
    masks: dict[str, np.ndarray],
    model: keras.Model,
    dataset: ImageData,
    folder: Path,
    count: int,
) -> str:
    """Export what a run trains on `count` photos, bool [N] by name. Returns the text to print."""
    images, batch_size = command.data, command.network.batch_size
    fraction = images.test_fraction or TEST_FRACTION
    recipe = {"augment": images.augment, "seed": command.network.seed, "test_fraction": fraction}
    text = export_training(model, masks, command.training, batch_size, dataset.class_names, folder, recipe)
    return f"{text}\n{needs_line(folder, count)}"


def export_training(
    model: keras.Model,
    masks: Mapping[str, np.ndarray],
    settings: Settings,
    batch_size: int,
    classes: Sequence[str],
    folder: Path,
    recipe: Mapping[str, Any],
) -> str:
    """Write the folder for a board, and return the text to print.

    Args:
        model: a classifier of images that returns logits, with the weights to start from.
        masks: what each selection trains, bool [N] over `model.trainable_variables`, by its name.
        settings: of training.
        batch_size: images a step.
        classes: their names, in the order of the labels.
        folder: is created.
        recipe: further entries of the record's "recipe": "augment", "seed", "test_fraction".

    Raises:
        UserError: LiteRT cannot train the network, or a file cannot be written.
    """
    scripts = {script.name: script for script in check_folder(folder)} | {DIGESTS: Path(digests.__file__)}
    optimizer = optimizer_of(settings, 1, model)
    optimizer.build(model.trainable_variables)
    part, names, union = (
        min(settings.micro_batch or MAX_PART, batch_size),
        tensor_names(model),
        np.any([*masks.values()], 0),
    )
    inference = inference_file(model, [*compress(model.trainable_variables, union)], partial(converted_function, model))
    training = TrainingFile(model, optimizer, [*masks.values()], part, inference.arrays if inference else None)
    files = {TRAINING: training.content} | ({INFERENCE: inference.content} if inference else {})
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    selections = [
        _selection_record(name, [*compress(names, mask)], step, suffixed("", index))
        for index, ((name, mask), step) in enumerate(zip(masks.items(), training.steps, strict=True))
    ]
    record = {
        "format": FORMAT,
        "id": hashes[TRAINING][:16],
        "sha256": hashes,
        "classes": [*classes],
        "size": model.input_shape[1],
        "part": part,
        "variables": [*compress(names, union)],
        "selections": selections,
        "recipe": {"batch_size": batch_size, **{key: asdict(settings)[key] for key in RECIPE}, **recipe},
        "offsets": inference.offsets if inference else None,
        "environment": environment(),
    }
    with alone_in(folder):
        check_folder(folder)  # another program may have exported to it in the meantime
        for name, content in files.items():
            with atomic_path(folder / name) as temporary:
                temporary.write_bytes(content)
        for name, script in scripts.items():
            with atomic_path(folder / name) as temporary:
                shutil.copyfile(script, temporary)
        with atomic_path(folder / START) as temporary:
            save_model(model, temporary)
        write_json(folder / RECORD, record)
    trained = "; ".join(f"{one['name']}: {one['trained_tensors']} of {len(names)} tensors" for one in selections)
    text = (
        f"{folder}: {TRAINING} ({len(training.content) / 1e6:.1f} MB) trains in LiteRT, {batch_size} images a step "
        f"({trained})\ncopy the folder to the board, then: pip install numpy pillow ai-edge-litert; python3 {SCRIPT} "
        "--data_dir PHOTOS"
    )
    if inference is None:
        text += f"\nthe board cannot write {INFERENCE}; main.py --load_board makes one from the weights it trained"
    return text


def _selection_record(name: str, tensors: list[str], step: StepFunctions, suffix: str) -> dict[str, Any]:
    """An entry of "selections" in board.json."""
    inputs = {key: [*spec.shape] for key, spec in step.signatures["gradients"].inputs.items()}
    return {
        "name": name,
        "suffix": suffix,
        "trained_tensors": len(tensors),
        "tensors": tensors,
        "features": {key: [*spec.shape[1:]] for key, spec in step.features.items()},
        "inputs": {key: shape for key, shape in inputs.items() if key not in ("labels", "weights")},
        "infer_inputs": [*step.signatures["infer"].inputs],
    }
