"""The folder from which a board trains, `main.py --export board`, and what comes back.

train.tflite       the signatures of `board.signatures` for LiteRT
train.pb           the same for TensorFlow 2.6 or later
inference.tflite   one image -> logits; the board writes its weights into a copy of it
board.json         what they contain: classes, recipe, variables that train, places of the arrays
board_train.py     trains; needs NumPy, Pillow, ai-edge-litert or TensorFlow, and the other board_*.py beside it
start.keras        the network with the weights that training starts from, for scripts/board/load.py
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import compress
from pathlib import Path
from typing import Any

import keras
import numpy as np

from elastic_trainer.board.graph_file import graph_file
from elastic_trainer.board.inference_file import inference_file
from elastic_trainer.board.signatures import FORMULAS, TrainingFunctions
from elastic_trainer.datasets import decoding, layout
from elastic_trainer.datasets.image_folder import TEST_FRACTION
from elastic_trainer.engine import feature_sums
from elastic_trainer.engine.closed_form_head import linear_head
from elastic_trainer.engine.optimizers import optimizer_of
from elastic_trainer.networks.saved_model import check_finite, load_model, save_model
from elastic_trainer.networks.tensors import tensor_names
from elastic_trainer.networks.tflite import convert
from elastic_trainer.settings import Settings
from elastic_trainer.system import files, memory
from elastic_trainer.system.errors import UserError
from elastic_trainer.system.machine import environment

TRAINING, GRAPH, INFERENCE = "train.tflite", "train.pb", "inference.tflite"
RECORD, START = "board.json", "start.keras"
TRAINED = "board.keras"  # what `load_board` writes
SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "board"
# Of the library, for the scripts.
COPIES = {
    "board_decoding.py": decoding,
    "board_layout.py": layout,
    "board_memory.py": memory,
    "board_sums.py": feature_sums,
}
# Images at a time in LiteRT: parts of 4 take 5 % more time and 15 MB less, larger parts only more memory
# (MobileNetV2 0.35, 160 px).
MAX_PART = 8
FORMAT = 3  # of board.json
RECIPE = (
    *("num_epochs", "batch_size", "learning_rate", "warmup", "validation_share", "starts_with_head", "average_head"),
    *("augment", "seed"),
)


def board_folder(settings: Settings) -> Path:
    """The folder of a run's export for a board."""
    return settings.logdir / f"{settings.run_name}_board"


def check_folder(folder: Path) -> list[Path]:
    """The scripts for a board. Raises `UserError` if there are none, or `folder` has an export."""
    scripts = [*SCRIPTS.glob("board_*.py")]
    if not scripts:
        raise UserError("--export: works only in a checkout, which has scripts/board")
    if (folder / RECORD).exists():
        raise UserError(f"--export: {folder} has an export already; move or remove it")
    return scripts


def export_training(
    model: keras.Model, mask: np.ndarray, settings: Settings, classes: Sequence[str], folder: Path
) -> str:
    """Write the folder for a board, and return the text to print.

    Args:
        model: a classifier of images that returns logits, with the weights to start from.
        mask: what trains, bool [N] over `model.trainable_variables`.
        settings: of training.
        classes: their names, in the order of the labels.
        folder: is created.

    Raises:
        UserError: no engine can train the network, or a file cannot be written.
    """
    scripts = {script.name: script.read_bytes() for script in check_folder(folder)}
    scripts |= {name: Path(module.__file__ or "").read_bytes() for name, module in COPIES.items()}
    optimizer = optimizer_of(settings, 1, model)
    optimizer.build(model.trainable_variables)
    names, trained = tensor_names(model), [*compress(model.trainable_variables, mask)]
    contents, parts, missing, inference = dict[str, bytes](), dict[str, int](), dict[str, str](), None
    try:
        inference = inference_file(model, trained)
    except UserError as error:
        missing[INFERENCE] = str(error)
    arrays = None if inference is None else inference.arrays
    for engine, file, formulas, most in (("litert", TRAINING, FORMULAS, MAX_PART), ("tensorflow", GRAPH, {}, None)):
        part = min(settings.micro_batch or most or settings.batch_size, settings.batch_size)
        try:
            functions = TrainingFunctions(model, optimizer, mask, part, arrays, formulas)
            contents[file] = functions.litert_file() if formulas else graph_file(functions.traced)
            parts[engine] = part
        except UserError as error:
            missing[engine] = str(error)
    if not parts:
        raise UserError(missing["litert"])
    sizes = ", ".join(f"{name} ({len(content) / 1e6:.1f} MB)" for name, content in contents.items())
    contents |= {INFERENCE: inference.content} if inference else {}
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    features, inferred = (functions.traced[name].structured_outputs for name in ("features", "infer"))
    record = {
        "format": FORMAT,
        "id": next(iter(hashes.values()))[:16],
        "sha256": hashes,
        "classes": [*classes],
        "size": model.input_shape[1],
        "parts": parts,
        "missing": missing,
        "variables": [*compress(names, mask)],
        "features": {key: [*value.shape[1:]] for key, value in features.items()},
        "head": _head_places(model, trained) if "head_inputs" in inferred else None,
        "recipe": {
            **{key: asdict(settings)[key] for key in RECIPE},
            "test_fraction": settings.test_fraction or TEST_FRACTION,
        },
        "offsets": inference.offsets if inference else None,
        "environment": environment(),
    }
    _write(folder, model, {**contents, **scripts}, record)
    notes = [
        *dict.fromkeys(missing.values()),
        f"{folder}: {sizes}, {settings.batch_size} images a step ({len(trained)} of {len(names)} tensors)",
        "copy the folder to the board, then: pip install numpy pillow ai-edge-litert (or a TensorFlow from 2.6 on); "
        "python3 board_train.py --data_dir PHOTOS",
    ]
    if inference is None:
        notes.append(f"the board cannot write {INFERENCE}; scripts/board/load.py makes one from the weights it trained")
    return "\n".join(notes)


def _write(folder: Path, model: keras.Model, contents: Mapping[str, bytes], record: dict[str, Any]) -> None:
    """Write all files of the export, board.json last."""
    for name, content in contents.items():
        with files.atomic_path(folder / name) as temporary:
            temporary.write_bytes(content)
    with files.atomic_path(folder / START) as temporary:
        save_model(model, temporary)
    files.write_json(folder / RECORD, record)


def _head_places(model: keras.Model, trained: Sequence[keras.Variable]) -> list[int] | None:
    """Where kernel and bias of the head are among the variables that train, if they are."""
    head, places = linear_head(model), {id(variable): place for place, variable in enumerate(trained)}
    found = [] if head is None else [places.get(id(variable)) for variable in (head.kernel, head.bias)]
    return [place for place in found if place is not None] if found and None not in found else None


# --- what comes back from a board -------------------------------------------------------------------------------------


def load_board(weights: Path) -> str:
    """Write `board.keras`, `board.tflite` and labels.txt beside the weights.npz that a board trained.

    start.keras and board.json are in its folder or in the one above. Returns the text to print. Raises `UserError` if a
    file is missing, damaged or of another network.
    """
    folder = next((each for each in (weights.parent, weights.parent.parent) if (each / RECORD).is_file()), None)
    if folder is None or not (folder / START).is_file():
        raise UserError(f"{weights}: needs {START} and {RECORD} beside it, or in the folder above")
    with files.trusting(folder / RECORD, "copy the folder of the export again"):
        record = json.loads((folder / RECORD).read_bytes())
        if record["format"] != FORMAT:
            raise ValueError
    model = load_model(folder / START, str(weights))
    variables = dict(zip(tensor_names(model), model.trainable_variables, strict=True))
    try:
        with np.load(weights) as file:
            if str(file["id"]) != record["id"]:
                other = f"is of another export than {folder / RECORD}; copy the folder of that export"
                raise UserError(f"{weights}: {other}")
            for index, name in enumerate(record["variables"]):
                variables[name].assign(file[f"weights_{index}"])
    except UserError:
        raise
    except Exception as error:  # zipfile and NumPy raise many types
        raise UserError(f"{weights}: is damaged, or no weights.npz of a board; copy it again") from error
    check_finite(model, f"{weights}")
    with files.atomic_path(weights.with_name(TRAINED)) as temporary:
        save_model(model, temporary)
    with files.atomic_path(weights.with_name(TRAINED).with_suffix(".tflite")) as temporary:
        temporary.write_bytes(*convert(model, False))
    files.write_text(weights.with_name("labels.txt"), "".join(f"{name}\n" for name in record["classes"]))
    kept = weights.with_name(TRAINED)
    test = shlex.join(["python", "main.py", "--evaluate", str(kept)])
    return f"written: {kept}, {kept.with_suffix('.tflite')}; to test it: {test} …"
