"""The formats of `--export` by name (no TensorFlow here): a plain dictionary, to which other programs may add."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any


@dataclass(frozen=True)
class Exporter:
    """A format of `--export`."""

    # Writes a trained model: it, `ImageData` to check it, the run's folder, the origin of the model, the seconds left
    # before a deadline, and the `ImageData` that trained it, if that was read -> a report for the user. If it
    # `is_for_board`, it is written instead of training: the settings, the model, `ImageData`, and what a run would
    # train first, bool [N] over `model.trainable_variables` -> a report.
    export: Callable[..., str]
    file: str  # the last one that it writes
    # Model -> what converting it takes on this device now, so that a deadline leaves time for it.
    conversion_seconds: Callable[[Any], float] = lambda model: 0.0
    is_for_board: bool = False


def _export_tflite(*args: Any, **named: Any) -> str:
    from elastic_trainer.evaluation.export import export_tflite

    return export_tflite(*args, **named)


def _conversion_seconds(model: Any, **named: Any) -> float:
    from elastic_trainer.networks.tflite import conversion_seconds

    return conversion_seconds(model, **named)


def _export_for_board(settings: Any, model: Any, data: Any, mask: Any) -> str:
    from elastic_trainer.board.export import board_folder, export_training

    return export_training(model, mask, settings, data.class_names, board_folder(settings))


EXPORTERS: dict[str, Exporter] = {
    "tflite": Exporter(_export_tflite, "export.json", _conversion_seconds),
    "tflite_int8": Exporter(
        partial(_export_tflite, is_int8=True), "export_int8.json", partial(_conversion_seconds, is_int8=True)
    ),
    "board": Exporter(_export_for_board, "board.json", is_for_board=True),
}
