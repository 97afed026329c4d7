"""The folder from which a board trains, `main.py --export train_tflite` or `train_graph`, and what comes back.

train.tflite       the signatures of `board.signatures` for LiteRT
train.pb           the same for TensorFlow 2.6 or later; only of `train_graph`
inference.tflite   one image -> logits; the board writes its weights into a copy of it
board.json         what they contain: classes, recipe, selections, variables, places of the arrays
board_train.py     trains; needs NumPy, Pillow, ai-edge-litert or TensorFlow, and the other board_*.py beside it
start.keras        the network with the weights that training starts from, for scripts/board/load.py
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import compress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import keras
import numpy as np

from elastic_trainer.board.graph_file import graph_file
from elastic_trainer.board.inference_file import inference_file
from elastic_trainer.board.needs import needs_line
from elastic_trainer.board.signatures import StepFunctions, TrainingFunctions, converted_function, suffixed
from elastic_trainer.datasets import decoding, digests
from elastic_trainer.datasets.image_data import ImageData, trained_images
from elastic_trainer.datasets.image_folder import TEST_FRACTION
from elastic_trainer.engine import feature_sums
from elastic_trainer.engine.closed_form_head import linear_head
from elastic_trainer.engine.optimizers import optimizer_of
from elastic_trainer.engine.task import ImageClassification
from elastic_trainer.networks.saved_model import check_finite, load_model, save_model
from elastic_trainer.networks.tensors import tensor_names
from elastic_trainer.networks.tflite import convert
from elastic_trainer.runs.reader import is_finished, read_run, read_settings
from elastic_trainer.runs.trainer import Trainer
from elastic_trainer.selection.elastic import make_budget
from elastic_trainer.selection.named import SCHEMES
from elastic_trainer.selection.schemes import SchemeContext
from elastic_trainer.settings import Evaluation, Settings
from elastic_trainer.system import files, memory
from elastic_trainer.system.errors import UserError
from elastic_trainer.system.machine import environment
from elastic_trainer.timing.table import TimingTable

TRAINING, GRAPH, INFERENCE = "train.tflite", "train.pb", "inference.tflite"
RECORD, START = "board.json", "start.keras"
TRAINED = "board.keras"  # what `load_board` writes
SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "board"
SCRIPT = "board_train.py"  # the one to start
COPIES = {
    "board_decoding.py": decoding,
    "board_digests.py": digests,
    "board_memory.py": memory,
    "board_sums.py": feature_sums,
}  # of the library, for the scripts
# Images at a time in LiteRT: parts of 4 take 5 % more time and 15 MB less, larger parts only more memory
# (MobileNetV2 0.35, 160 px).
MAX_PART = 8
FORMAT = 2  # of board.json
RECIPE = ("num_epochs", "learning_rate", "warmup", "validation_share", "starts_with_head", "average_head")


def board_folder(settings: Settings) -> Path:
    """The folder of a run's export for a board."""
    return settings.logdir / f"{settings.run_name}_board"


def check_folder(folder: Path) -> list[Path]:
    """The scripts for a board. Raises `UserError` if there are none, or `folder` has an export or is read-only."""
    scripts = [*SCRIPTS.glob("board_*.py")]
    if not scripts:
        raise UserError("--export: works only in a checkout, which has scripts/board")
    if (folder / RECORD).exists():
        raise UserError(f"--export: {folder} has an export already; move or remove it")
    if not os.access(files.existing_parent(folder), os.W_OK):
        raise UserError(f"--export: {files.existing_parent(folder)} cannot be written to")
    return scripts


def export_for_board(
    run: Settings | Evaluation,
    model: keras.Model,
    dataset: ImageData,
    table: TimingTable | None = None,
    rhos: Sequence[float] = (),
) -> str:
    """Export what a run would train first, or what a finished one trained last, with its best weights.

    Args:
        run: its settings, or the evaluation of a finished one.
        model, dataset: of it.
        table: timing table of the run, if its scheme is elastic.
        rhos: between whose selections, and that at the rho of the run, the board chooses.

    Returns:
        The text to print.

    Raises:
        UserError: the run to evaluate is not finished, or does what a board cannot do.
    """
    if isinstance(run, Evaluation):
        settings, folder = _finished_run(run), run.model.parent / "board"
        masks = {"last": read_run(run.model.parent).selections().chosen[-1]}
        count = len(trained_images(run.model)) + dataset.test_count
        export = run.settings.export
    else:
        settings, folder, export = run, board_folder(run), run.export
        masks = {
            run.train_type if table is None else f"rho{rho:g}": _first_mask(run, rho, model, dataset, table)
            for rho in (run.rho, *rhos)
        }
        count = dataset.train_count + dataset.test_count + dataset.tested_later
    recipe = {
        "augment": settings.augment,
        "seed": settings.seed,
        "test_fraction": settings.test_fraction or TEST_FRACTION,
    }
    batch_size, classes = settings.batch_size, dataset.class_names
    text = export_training(model, masks, settings, batch_size, classes, folder, recipe, export == "train_graph")
    return f"{text}\n{needs_line(folder, count)}"


def _finished_run(evaluation: Evaluation) -> Settings:
    """The run whose model is evaluated. Raises `UserError` if it is not finished, or does what a board cannot do."""
    folder = evaluation.model.parent
    if not is_finished(folder):
        export = evaluation.settings.export
        raise UserError(f"--evaluate {evaluation.model}: --export {export} needs the folder of a finished run")
    run = read_settings(folder)
    if run.augment == "flip_rotate" or run.max_steps is not None:
        raise UserError(
            f"--evaluate {folder}: the run has --augment flip_rotate or --max_steps, which a board does not have; "
            "export a run without them"
        )
    return run


def _first_mask(
    settings: Settings, rho: float, model: keras.Model, data: ImageData, table: TimingTable | None
) -> np.ndarray:
    """What the run would train first at this rho: bool [N]. Raises `UserError` if a board cannot train that."""
    settings, train_type = replace(settings, rho=rho), settings.train_type
    budget = None if table is None else make_budget(model, data, settings, table)
    entry, task = SCHEMES[train_type], ImageClassification(model)
    if not entry.can_split:  # as a board trains
        raise UserError(f"--export: cannot be combined with --train_type {train_type}; give another")
    trainer = Trainer(task, data, entry.make(SchemeContext(task, data, settings, budget)), settings)
    possible = trainer.training.features.are_possible
    return trainer.scheme.select(trainer.history.progress(trainer.schedule, possible), trainer.training).mask


def export_training(
    model: keras.Model,
    masks: Mapping[str, np.ndarray],
    settings: Settings,
    batch_size: int,
    classes: Sequence[str],
    folder: Path,
    recipe: Mapping[str, Any],
    with_graph: bool = False,
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
        with_graph: for TensorFlow, too; LiteRT may then lack what the network needs.

    Raises:
        UserError: no file can train the network, or one cannot be written.
    """
    scripts = {script.name: script for script in check_folder(folder)}
    scripts |= {name: Path(module.__file__ or "") for name, module in COPIES.items()}
    optimizer = optimizer_of(settings, 1, model)
    optimizer.build(model.trainable_variables)
    names, union = tensor_names(model), np.any([*masks.values()], 0)
    trained = [*compress(model.trainable_variables, union)]
    contents, parts, notes, inference = dict[str, bytes](), dict[str, int](), list[str](), None
    make = partial(TrainingFunctions, model, optimizer, [*masks.values()])
    try:
        inference = inference_file(model, trained, partial(converted_function, model))
        part = min(settings.micro_batch or MAX_PART, batch_size)
        functions = make(part, inference.arrays if inference else None)
        contents[TRAINING], parts["litert"] = functions.litert_file(), part
    except UserError as error:
        if not with_graph:
            raise
        notes.append(str(error))
    if with_graph:
        part = min(settings.micro_batch or batch_size, batch_size)
        functions = make(part, inference.arrays if inference else None, formulas={})
        contents[GRAPH], parts["tensorflow"] = graph_file(functions.traced), part
    files_text = " and ".join(
        f"{name} ({len(content) / 1e6:.1f} MB) for {'LiteRT' if name == TRAINING else 'TensorFlow 2.6 or later'}"
        for name, content in contents.items()
    )
    contents |= {INFERENCE: inference.content} if inference else {}
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    selections = [
        _selection_record(name, [*compress(names, mask)], step, suffixed("", index))
        for index, ((name, mask), step) in enumerate(zip(masks.items(), functions.steps, strict=True))
    ]
    record = {
        "format": FORMAT,
        "id": next(iter(hashes.values()))[:16],
        "sha256": hashes,
        "classes": [*classes],
        "size": model.input_shape[1],
        "parts": parts,
        "variables": [*compress(names, union)],
        "head": _head_places(model, trained) if "head_inputs" in functions.traced["infer"].structured_outputs else None,
        "selections": selections,
        "recipe": {"batch_size": batch_size, **{key: asdict(settings)[key] for key in RECIPE}, **recipe},
        "offsets": inference.offsets if inference else None,
        "environment": environment(),
    }
    record["digest"] = digests.record_digest(record)
    with files.alone_in(folder):
        check_folder(folder)  # another program may have exported to it in the meantime
        for name, content in contents.items():
            with files.atomic_path(folder / name) as temporary:
                temporary.write_bytes(content)
        for name, script in scripts.items():
            with files.atomic_path(folder / name) as temporary:
                shutil.copyfile(script, temporary)
        with files.atomic_path(folder / START) as temporary:
            save_model(model, temporary)
        files.write_json(folder / RECORD, record)
    selected = "; ".join(f"{one['name']}: {one['trained_tensors']} of {len(names)} tensors" for one in selections)
    packages = "numpy pillow ai-edge-litert" + (" (or a TensorFlow from 2.6 on)" if with_graph else "")
    notes += [
        f"{folder}: {files_text}, {batch_size} images a step ({selected})",
        f"copy the folder to the board, then: pip install {packages}; python3 {SCRIPT} --data_dir PHOTOS",
    ]
    if inference is None:
        notes.append(f"the board cannot write {INFERENCE}; scripts/board/load.py makes one from the weights it trained")
    return "\n".join(notes)


def _head_places(model: keras.Model, trained: Sequence[keras.Variable]) -> list[int] | None:
    """Where kernel and bias of the head are among the variables that train, if they are."""
    head, places = linear_head(model), {id(variable): place for place, variable in enumerate(trained)}
    found = [] if head is None else [places.get(id(variable)) for variable in (head.kernel, head.bias)]
    return [place for place in found if place is not None] if found and None not in found else None


def _selection_record(name: str, tensors: list[str], step: StepFunctions, suffix: str) -> dict[str, Any]:
    """An entry of "selections" in board.json."""
    return {
        "name": name,
        "suffix": suffix,
        "trained_tensors": len(tensors),
        "tensors": tensors,
        "features": {key: [*spec.shape[1:]] for key, spec in step.features.items()},
    }


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
        if record["format"] != FORMAT or record["digest"] != digests.record_digest(record):
            raise ValueError
    model = load_model(folder / START, str(weights))
    variables = dict(zip(tensor_names(model), model.trainable_variables, strict=True))
    unknown = {*record["variables"]} - {*variables}
    if unknown:
        raise UserError(f"{folder / RECORD}: variables: the network of {START} has no {min(unknown)}; copy both again")
    with files.reading(f"{weights}"):
        try:
            with np.load(weights) as file:
                if str(file["id"]) != record["id"]:
                    raise ValueError(f"is of another export than {folder / RECORD}; copy the folder of that export")
                for index, name in enumerate(record["variables"]):
                    variables[name].assign(file[f"weights_{index}"])
        except (KeyError, EOFError, zipfile.BadZipFile, zlib.error, UnpicklingError, NotImplementedError) as error:
            raise ValueError("is damaged, or no weights.npz of a board; copy it again") from error
    check_finite(model, f"{weights}")
    with files.atomic_path(weights.with_name(TRAINED)) as temporary:
        save_model(model, temporary)
    with files.atomic_path(weights.with_name(TRAINED).with_suffix(".tflite")) as temporary:
        temporary.write_bytes(*convert(model, False))
    files.write_text(weights.with_name("labels.txt"), "".join(f"{name}\n" for name in record["classes"]))
    kept = weights.with_name(TRAINED)
    test = shlex.join(["python", "main.py", "--evaluate", str(kept)])
    return f"written: {kept}, {kept.with_suffix('.tflite')}; to test it: {test} …"


def board_table(path: Path, table: TimingTable, batch_size: int) -> TimingTable:
    """`table` in times of the board: a line through what it and the board's times.json say of the measured selections.

    A single selection gives a line through 0, as do times whose line would predict less than 0 for a step that trains
    nothing. Steps on a board start from features. What the board takes for features is not in the table, nor is its
    memory. Raises `UserError` if the file is damaged, or is of another network or batch size.
    """
    with files.trusting(path, "measure again on the board"):
        record = json.loads(path.read_bytes())
        times = [({*one["tensors"]}, float(one["step_ms"])) for one in record["selections"]]
        if not times or min(ms for _, ms in times) <= 0:
            raise ValueError
    if record.get("batch_size") != batch_size:
        was = record.get("batch_size")
        raise UserError(f"--times {path}: is of {was} images a step; give --batch_size as there")
    here, there = [], []
    for tensors, ms in times:
        unknown = tensors - {*table.names}
        if unknown:
            raise UserError(f"--times {path}: is of another network; this one has no tensor {min(unknown)}")
        mask = np.zeros(len(table.names), bool)
        mask[table.positions] = [name in tensors for name in table.names]
        here.append(table.predict_ms(mask, misses=0.0))
        there.append(ms)
    factor, added_ms = float(np.mean(there) / np.mean(here)), 0.0
    if len({*here}) > 1:
        slope, intercept = np.polyfit(here, there, 1)
        if slope > 0 <= intercept:  # else noise is larger than what the selections differ by
            factor, added_ms = float(slope), float(intercept)
    there_table = table.scaled(factor)
    fit = replace(there_table.fit, constant_ms=there_table.fit.constant_ms + added_ms)
    full_ms = there_table.full_step_ms + added_ms
    return replace(there_table, fit=fit, full_step_ms=full_ms, memory=None)
