"""What the server of a fleet records in its run's folder, as other runs do: tables, curves, models.

metrics.csv      a row a round; row 0 is the closed-form head
boards.csv       a row a board and round: selection, times, bytes
selections.csv   a row a tensor of each board and round
events.out.*     TensorBoard's curves; those of each board are in boards/<name>
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from elastic_trainer.errors import UserError, importing
from elastic_trainer.extensions.fleet.messages import Update
from elastic_trainer.extensions.fleet.roster import Answer
from elastic_trainer.files import write_csv, write_json
from elastic_trainer.machine import environment
from elastic_trainer.runs.checkpoint import Checkpoints, State
from elastic_trainer.runs.reader import CONFIG, METRICS, SELECTIONS, SUMMARY

if TYPE_CHECKING:
    import keras

BOARDS, EVENTS = "boards.csv", "events.out.tfevents.0.fleet"
PLACES = "places"  # of the tensors that trained


class Records:
    """The records of one run of a fleet.

    Args:
        folder: the run's.
        config: its options, for config.json.
        names: of `model.trainable_variables`.

    Attributes:
        rounds, boards: rows of metrics.csv and boards.csv; those of boards have the `PLACES` of what trained, too.
    """

    def __init__(self, folder: Path, config: dict[str, Any], names: list[str]) -> None:
        self.folder, self._config, self._names = folder, config, names
        self.rounds: list[dict[str, Any]] = []
        self.boards: list[dict[str, Any]] = []
        self._checkpoints = Checkpoints(folder / "checkpoints")
        if not (folder / CONFIG).exists():
            write_json(folder / CONFIG, {**config, "environment": environment()})

    def restore(self) -> State | None:
        """The newest checkpoint, if there is one; the records go on from there.

        Raises `UserError` if an earlier version wrote it, which did not know the tests of its best model.
        """
        state = self._checkpoints.latest()
        if state is not None:
            kept = state.record
            if "tests" not in kept or "selections" in kept:
                why = "an earlier version made its rounds; start a new fleet without --resume"
                raise UserError(f"{self.folder}: {why}")
            self.rounds, self.boards = kept["rounds"], kept["boards"]
        return state

    def save(self, arrays: dict[str, np.ndarray], record: dict[str, Any]) -> None:
        """Write a checkpoint after a round, and all tables."""
        self.write()
        kept = {**record, "rounds": self.rounds, "boards": self.boards}
        self._checkpoints.save(len(self.rounds), State(arrays, kept))

    def write(self) -> None:
        """Write all tables completely."""
        for name, rows in ((METRICS, self.rounds), (BOARDS, self.boards)):
            if rows:
                columns = [column for column in rows[0] if column != PLACES]
                write_csv(self.folder / name, columns, ([row[column] for column in columns] for row in rows))
        chosen = (
            (row["round"], row["board"], name, int(place in row[PLACES]))
            for row in self.boards
            for place, name in enumerate(self._names)
        )
        write_csv(self.folder / SELECTIONS, ("epoch", "board", "name", "chosen"), chosen)

    def add_board(self, number: int, answer: Answer, update: Update, places: list[int], round_seconds: float) -> None:
        """Record what a board did in a round; `places` are those of the tensors that it trained."""
        name, reported = answer.about.name, update.reported
        row = {
            "round": number,
            "board": name,
            "images": update.images,
            "steps": update.steps,
            "trained_tensors": len(places),
            "round_seconds": round_seconds,
            "train_seconds": reported["seconds"],
            "answer_seconds": answer.seconds,
            "predicted_step_ms": reported["predicted_step_ms"],
            "step_ms": reported["step_ms"],
            "train_loss": reported["loss"],
            "bytes_down": answer.sent.size,
            "bytes_up": answer.parcel.size,
            PLACES: places,
        }
        self.boards.append(row)
        place = self.folder / "boards" / (re.sub(r"[^\w.-]", "_", name) or "_")
        self._draw(place, number, "board", row)

    def add_round(self, values: dict[str, Any]) -> dict[str, Any]:
        """Record a round whose model is not tested yet; returns its row of metrics.csv."""
        untested = {"test_loss": None, "test_accuracy": None, "kept": None}
        self.rounds.append({"epoch": len(self.rounds), **values, "coverage": self.coverage(), **untested})
        return self.rounds[-1]

    def add_test(self, row: dict[str, Any], test: dict[str, float], model: keras.Model, is_kept: bool) -> None:
        """Record what the model of a round reaches, and save it if it is the best."""
        from elastic_trainer.networks.saved_model import save_last_and_best

        row |= {f"test_{name}": test[name] for name in ("loss", "accuracy")} | {"kept": int(is_kept)}
        if is_kept:
            save_last_and_best(model, self.folder, row["test_accuracy"], None)
        self._draw(self.folder, row["epoch"], "fleet", row)

    def coverage(self) -> float:
        """The share of all boards' rounds in which the least trained tensor trained."""
        counts = np.zeros(len(self._names))
        for row in self.boards:
            counts[row[PLACES]] += 1
        return float(np.min(counts) / len(self.boards)) if self.boards else 0.0

    def _draw(self, folder: Path, number: int, kind: str, row: dict[str, Any]) -> None:
        """Write a point of TensorBoard's curves at a round, for each number in a row.

        The file is open only meanwhile: a fleet may have a thousand boards.
        """
        with importing("TensorBoard's events"):
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.plugins.scalar.summary_v2 import scalar_pb
            from tensorboard.summary.writer.record_writer import RecordWriter

        events, path = [], folder / EVENTS
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            events.append(Event(wall_time=time.time(), file_version="brain.Event:2"))
        for name, value in row.items():
            if isinstance(value, int | float) and name not in ("epoch", "round"):
                point = scalar_pb(f"{kind}/{name}", float(value))
                events.append(Event(wall_time=time.time(), step=number, summary=point))
        with path.open("ab") as file:
            for event in events:
                RecordWriter(file).write(event.SerializeToString())

    def finish(self, seconds: float) -> dict[str, Any]:
        """Write summary.json, and delete the checkpoints; what it contains. `seconds` are those of all rounds."""
        kept = [row["test_accuracy"] for row in self.rounds if row["kept"]] or [0.0]
        summary = {
            **{key: self._config.get(key) for key in ("model_name", "dataset_name", "train_type", "seed")},
            "epochs": len(self.rounds),
            "steps": max(self.rounds[-1]["step"], 1),
            "start_accuracy": self.rounds[0]["test_accuracy"],
            "best_accuracy": kept[-1],
            "final_accuracy": kept[-1],
            "train_seconds": max(seconds, 1e-3),
            "validation_seconds": sum(row["validation_seconds"] for row in self.rounds),
            "selection_seconds": 0.0,
            "selection_percent": 0.0,
            "median_step_ms": None,
            "coverage": self.coverage(),
            **{name: sum(row[name] for row in self.rounds) for name in ("bytes_down", "bytes_up", "late")},
        }
        write_json(self.folder / SUMMARY, summary)
        self._checkpoints.clear()
        return summary
