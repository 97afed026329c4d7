"""What `main.py --export train_tflite` writes for a board: what a run would train first, or what a finished one did.

See `board.export` for the files.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import keras
import numpy as np

from elastic_trainer.cli.commands import EvaluateCommand, TrainCommand
from elastic_trainer.cli.train_command import parse_training
from elastic_trainer.datasets.image_data import ImageData, trained_images
from elastic_trainer.datasets.image_folder import TEST_FRACTION
from elastic_trainer.errors import UserError
from elastic_trainer.extensions.board.export import board_folder, export_training, first_mask
from elastic_trainer.extensions.board.needs import needs_line
from elastic_trainer.runs.reader import is_finished, read_config, read_run
from elastic_trainer.selection.budget import make_budget
from elastic_trainer.timing.table import TimingTable


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
    settings = command.training
    masks = {}
    for rho in (settings.rho, *(command.extra["export_rho"] or ())):
        own, budget = replace(settings, rho=rho), None
        if table is not None:
            budget = make_budget(model, dataset, own, table)
        name = command.train_type if table is None else f"rho{rho:g}"
        masks[name] = first_mask(command.train_type, model, dataset, own, budget)
    count = dataset.train_count + dataset.test_count + (dataset.held_out.test_count if dataset.held_out else 0)
    return _written(command, masks, model, dataset, board_folder(command.run), count)


def _export_last_selection(command: EvaluateCommand, model: keras.Model, dataset: ImageData) -> str:
    """Export what a finished run trained last, with its best weights. Returns the text to print.

    Raises:
        UserError: the run is not finished, or does what a board cannot do.
    """
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
    return _written(run, masks, model, dataset, folder / "board", count)


def _written(
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
