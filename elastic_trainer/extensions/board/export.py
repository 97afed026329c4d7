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
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

import keras
import numpy as np

from elastic_trainer.datasets import digests
from elastic_trainer.datasets.image_data import ImageData
from elastic_trainer.errors import UserError
from elastic_trainer.evaluation.export import convert
from elastic_trainer.extensions.board.inference_file import inference_file
from elastic_trainer.extensions.board.signatures import (
    StepFunctions,
    TrainingFunctions,
    converted_file,
    converted_function,
    suffixed,
)
from elastic_trainer.files import (
    TEXT,
    Kinds,
    alone_in,
    atomic_path,
    existing_parent,
    number,
    read_json,
    reading,
    write_json,
    write_text,
)
from elastic_trainer.machine import environment
from elastic_trainer.networks.saved_model import check_finite, load_model, save_model
from elastic_trainer.networks.tensors import tensor_names
from elastic_trainer.registry import SCHEMES
from elastic_trainer.selection.budget import TimeBudget
from elastic_trainer.selection.schemes import SchemeContext
from elastic_trainer.settings import RunSettings, Settings
from elastic_trainer.task import ImageClassification
from elastic_trainer.trainer import Trainer
from elastic_trainer.training.optimizers import optimizer_of

TRAINING, INFERENCE, RECORD, START = "train.tflite", "inference.tflite", "board.json", "start.keras"
TRAINED = "board.keras"  # what `load_board` writes
SCRIPTS = Path(__file__).resolve().parents[3] / "scripts" / "board"
SCRIPT, DIGESTS = "board_train.py", "board_digests.py"  # the one to start; a copy of `datasets.digests`
MAX_PART = 8  # images at a time: parts of 4 take 15 % more time, parts of 16 20 MB more (MobileNetV2 0.35, 160 px)
FORMAT = 1  # of board.json
RECIPE = ("num_epochs", "learning_rate", "warmup", "validation_share")


# What `load_board` reads of board.json.
BOARD_FIELDS: dict[str, Kinds] = {
    "format": number(FORMAT, FORMAT, kind=int),
    "id": TEXT,
    "classes": [TEXT],
    "variables": [TEXT],
}


def board_folder(run: RunSettings) -> Path:
    """The folder of a run's export for a board."""
    return run.logdir / f"{run.run_name}_board"


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
    scripts = check_folder(folder)
    part = min(settings.micro_batch or MAX_PART, batch_size)
    optimizer = optimizer_of(settings, 1, model)
    optimizer.build(model.trainable_variables)
    names = tensor_names(model)
    union = np.any([*masks.values()], axis=0)
    trained = [*compress(model.trainable_variables, union)]
    inference = inference_file(model, trained, partial(converted_function, model))
    arrays = inference.arrays if inference else None
    functions = TrainingFunctions(model, optimizer, [*masks.values()], part, batch_size > part, arrays)
    files = {TRAINING: converted_file(functions)} | ({INFERENCE: inference.content} if inference else {})
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    record = {
        "format": FORMAT,
        "id": hashes[TRAINING][:16],
        "sha256": hashes,
        "classes": [*classes],
        "size": model.input_shape[1],
        "part": part,
        "variables": [*compress(names, union)],
        "selections": [
            _selection_record(name, mask, [*compress(names, mask)], step, index)
            for index, ((name, mask), step) in enumerate(zip(masks.items(), functions.steps, strict=True))
        ],
        "recipe": {"batch_size": batch_size, **{key: asdict(settings)[key] for key in RECIPE}, **recipe},
        "offsets": inference.offsets if inference else None,
        "environment": environment(),
    }
    with alone_in(folder):
        check_folder(folder)  # another program may have exported to it in the meantime
        for name, content in files.items():
            with atomic_path(folder / name) as temporary:
                temporary.write_bytes(content)
        for name, script in {**{script.name: script for script in scripts}, DIGESTS: Path(digests.__file__)}.items():
            with atomic_path(folder / name) as temporary:
                shutil.copyfile(script, temporary)
        with atomic_path(folder / START) as temporary:
            save_model(model, temporary)
        write_json(folder / RECORD, record)
    return "\n".join(_report(folder, record, files[TRAINING], len(union)))


def first_mask(
    train_type: str, model: keras.Model, data: ImageData, settings: Settings, budget: TimeBudget | None
) -> np.ndarray:
    """What a run of this scheme would train first: bool [N] over `model.trainable_variables`.

    Raises:
        UserError: it trains without steps, or changes the network.
    """
    entry, task = SCHEMES[train_type], ImageClassification(model)
    if not entry.takes("micro_batch"):  # as a board trains
        raise UserError(f"--export train_tflite: cannot be combined with --train_type {train_type}; give another")
    scheme = entry.make(SchemeContext(task, data, settings, budget))
    trainer = Trainer(task, data, scheme, settings)
    possible = trainer.training.features.are_possible
    return trainer.scheme.select(trainer.history.progress(trainer.schedule, possible), trainer.training).mask


def _selection_record(
    name: str, mask: np.ndarray, tensors: list[str], step: StepFunctions, index: int
) -> dict[str, Any]:
    """An entry of "selections" in board.json."""
    specs = {"features": step.features, "inputs": step.signatures["gradients"].inputs}
    shapes = {kind: {key: [*spec.shape] for key, spec in found.items()} for kind, found in specs.items()}
    return {
        "name": name,
        "suffix": suffixed("", index),
        "trained_tensors": int(mask.sum()),
        "tensors": tensors,
        "features": {key: shape[1:] for key, shape in shapes["features"].items()},
        "inputs": {key: shape for key, shape in shapes["inputs"].items() if key not in ("labels", "weights")},
        "infer_inputs": [*step.signatures["infer"].inputs],
    }


def _report(folder: Path, record: dict[str, Any], content: bytes, count: int) -> list[str]:
    selections = "; ".join(
        f"{one['name']}: {one['trained_tensors']} of {count} tensors" for one in record["selections"]
    )
    lines = [
        f"{folder}: {TRAINING} ({len(content) / 1e6:.1f} MB) trains in LiteRT, {record['recipe']['batch_size']} images "
        f"a step ({selections})",
        f"copy the folder to the board, then: pip install numpy pillow ai-edge-litert; python3 {SCRIPT} "
        "--data_dir PHOTOS",
    ]
    if record["offsets"] is None:
        lines.append(f"the board cannot write {INFERENCE}; main.py --load_board makes one from the weights it trained")
    return lines


# --- what comes back from the board -----------------------------------------------------------------------------------


def load_board(weights: Path) -> str:
    """Write `board.keras`, `board.tflite` and labels.txt beside the weights that a board trained.

    Args:
        weights: weights.npz of board_train.py. start.keras and board.json are in its folder or in the one above.

    Returns:
        The text to print.

    Raises:
        UserError: a file is missing, damaged or of another network.
    """
    folder = next((each for each in (weights.parent, weights.parent.parent) if (each / RECORD).is_file()), None)
    if folder is None or not (folder / START).is_file():
        raise UserError(f"--load_board {weights}: needs {START} and {RECORD} beside it, or in the folder above")
    record = read_json(folder / RECORD, BOARD_FIELDS)
    model = load_model(folder / START, "--load_board")
    variables = dict(zip(tensor_names(model), model.trainable_variables, strict=True))
    with reading(f"--load_board {weights}"), np.load(weights) as file:
        if str(file["id"]) != record["id"]:
            raise ValueError(f"is of another export than {folder / RECORD}; copy the folder of that export")
        for index, name in enumerate(record["variables"]):
            variables[name].assign(file[f"weights_{index}"])
    check_finite(model, f"--load_board {weights}")
    with atomic_path(weights.with_name(TRAINED)) as temporary:
        save_model(model, temporary)
    with atomic_path(weights.with_name(TRAINED).with_suffix(".tflite")) as temporary:
        temporary.write_bytes(convert(model, quantise=False))
    write_text(weights.with_name("labels.txt"), "".join(f"{name}\n" for name in record["classes"]))
    kept = weights.with_name(TRAINED)
    test = shlex.join(["python", "main.py", "--evaluate", str(kept)])
    return f"written: {kept}, {kept.with_suffix('.tflite')}; to test it: {test} …"
