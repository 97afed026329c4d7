"""The timing table of a board, from the times of a few selections that `board_train.py --profile` measured there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from elastic_trainer.errors import UserError
from elastic_trainer.files import TEXT, Kinds, number, read_json
from elastic_trainer.timing.table import TimingTable

TIMES: dict[str, Kinds] = {  # what is read of times.json
    "batch_size": number(1, kind=int),
    "selections": [{"tensors": [TEXT], "step_ms": number(0, above=True)}],
}


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
    names = ("t_dw_ms", "t_dy_ms", "t_fw_ms", "preprocessing_ms", "forward_ms", "gradient_pass_ms")
    scaled = {name: factor * getattr(table, name) for name in names}
    fit = replace(table.fit, constant_ms=factor * table.fit.constant_ms + added_ms)
    full_step_ms = factor * table.full_step_ms + added_ms
    return replace(table, **scaled, full_step_ms=full_step_ms, fit=fit, details={})
