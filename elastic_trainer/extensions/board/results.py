"""What comes back from a board: the weights that it trained (weights.npz), and the times it measured (times.json)."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np

from elastic_trainer.errors import UserError
from elastic_trainer.evaluation.export import convert
from elastic_trainer.extensions.board.export import FORMAT, RECORD, START
from elastic_trainer.files import TEXT, Kinds, atomic_path, number, read_json, reading, write_text
from elastic_trainer.networks.saved_model import check_finite, load_model, save_model
from elastic_trainer.networks.tensors import tensor_names
from elastic_trainer.timing.table import TimingTable

TRAINED = "board.keras"  # what `load_board` writes
# What is read of board.json and of times.json.
BOARD_FIELDS: dict[str, Kinds] = {
    "format": number(FORMAT, FORMAT, kind=int),
    "id": TEXT,
    "classes": [TEXT],
    "variables": [TEXT],
}
TIMES: dict[str, Kinds] = {
    "batch_size": number(1, kind=int),
    "selections": [{"tensors": [TEXT], "step_ms": number(0, above=True)}],
}


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


def board_table(table: TimingTable, path: Path, batch_size: int) -> TimingTable:
    """`table` in times of the board: a line through what both say of the measured selections.

    A single selection gives a line through 0, as do times whose line would predict less than 0 for a step that trains
    nothing. Steps on a board start from features. What the board takes for features is not in the table, nor is its
    memory.

    Args:
        table: of this machine.
        path: times.json.
        batch_size: images a step.

    Raises:
        UserError: the file is damaged, or is of another network or batch size.
    """
    record = read_json(path, TIMES)
    if record["batch_size"] != batch_size:
        raise UserError(f"--board_times {path}: is of {record['batch_size']} images a step; give --batch_size as there")
    if not record["selections"]:
        raise UserError(f"{path}: selections: is empty")
    here, there = [], []
    for one in record["selections"]:
        unknown = {*one["tensors"]} - {*table.names}
        if unknown:
            raise UserError(f"--board_times {path}: is of another network; this one has no tensor {min(unknown)}")
        mask = np.zeros(len(table.names), bool)
        mask[table.positions] = [name in one["tensors"] for name in table.names]
        here.append(table.predict_ms(mask, misses=0.0))
        there.append(one["step_ms"])
    factor, added_ms = float(np.mean(there) / np.mean(here)), 0.0
    if len({*here}) > 1:
        slope, intercept = np.polyfit(here, there, 1)
        if slope > 0 <= intercept:  # else noise is larger than what the selections differ by
            factor, added_ms = float(slope), float(intercept)
    there_table = table.scaled(factor)
    fit = replace(there_table.fit, constant_ms=there_table.fit.constant_ms + added_ms)
    full_ms = there_table.full_step_ms + added_ms
    return replace(there_table, fit=fit, full_step_ms=full_ms, memory=None, compiling_ms=None, plain_step_ms=None)
