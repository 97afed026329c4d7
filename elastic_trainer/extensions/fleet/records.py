"""What the server of a fleet records in its run's folder, as other runs do: tables, curves, models.

metrics.csv      a row a round; row 0 is the closed-form head
boards.csv       a row a board and round: selection, times, bytes, what went wrong
selections.csv   a row a tensor of each board and round
events.out.*     TensorBoard's curves; those of each board are in boards/<name>
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from elastic_trainer.extensions.fleet.average import Reply
from elastic_trainer.extensions.fleet.roster import Answer
from elastic_trainer.files import write_csv, write_json
from elastic_trainer.machine import environment
from elastic_trainer.runs.checkpoint import Checkpoints, State
from elastic_trainer.runs.reader import CONFIG, METRICS, SELECTIONS, SUMMARY

if TYPE_CHECKING:
    import keras

BOARDS = "boards.csv"


class Records:
    """The records of one run of a fleet.

    Args:
        folder: the run's.
        config: its options, for config.json.
        names: of `model.trainable_variables`.

    Attributes:
        rounds, boards: rows of metrics.csv and boards.csv.
        selections: of each board and round: round, board, and the places of the tensors that trained.
        best: score of the model in best.keras; None if there is none.
    """

    def __init__(self, folder: Path, config: dict[str, Any], names: list[str]) -> None:
        self.folder, self._names = folder, names
        self.rounds: list[dict[str, Any]] = []
        self.boards: list[dict[str, Any]] = []
        self.selections: list[tuple[int, str, list[int]]] = []
        self.best: float | None = None
        self.checkpoints = Checkpoints(folder / "checkpoints")
        self._writers: dict[str, Any] = {}
        if not (folder / CONFIG).exists():
            write_json(folder / CONFIG, {**config, "environment": environment()})

    def restore(self) -> State | None:
        """The newest checkpoint, if there is one; the records go on from there."""
        state = self.checkpoints.latest()
        if state is not None:
            kept = state.record
            self.rounds, self.boards, self.best = kept["rounds"], kept["boards"], kept["best"]
            self.selections = [(number, board, places) for number, board, places in kept["selections"]]
        return state

    def save(self, arrays: dict[str, np.ndarray], record: dict[str, Any]) -> None:
        """Write a checkpoint after a round, and all tables."""
        self.write()
        kept = {"rounds": self.rounds, "boards": self.boards, "selections": self.selections, "best": self.best}
        self.checkpoints.save(len(self.rounds), State(arrays, {**record, **kept}))

    def write(self) -> None:
        """Write all tables completely."""
        for name, rows in ((METRICS, self.rounds), (BOARDS, self.boards)):
            if rows:
                write_csv(self.folder / name, [*rows[0]], ([*row.values()] for row in rows))
        chosen = (
            (number, board, name, int(place in places))
            for number, board, places in self.selections
            for place, name in enumerate(self._names)
        )
        write_csv(self.folder / SELECTIONS, ("epoch", "board", "name", "chosen"), chosen)

    def add_round(self, values: dict[str, Any], test: dict[str, Any]) -> dict[str, Any]:
        """Record a round, its model's loss and accuracy as far as they are known; returns the row of metrics.csv."""
        tested = {f"test_{name}": test[name] for name in ("loss", "accuracy")}
        self.rounds.append({"epoch": len(self.rounds), **values, "coverage": self.coverage(), **tested})
        return self.rounds[-1]

    def add_board(self, number: int, answer: Answer, reply: Reply, places: list[int], round_seconds: float) -> None:
        """Record what a board did in a round; `places` are those of the tensors that it trained."""
        name, values = answer.member.name, answer.parcel.values
        row = {
            "round": number,
            "board": name,
            "images": reply.images,
            "steps": reply.steps,
            "trained_tensors": len(places),
            "round_seconds": round_seconds,
            "train_seconds": values.get("seconds"),
            "answer_seconds": answer.seconds,
            "predicted_step_ms": values.get("predicted_step_ms"),
            "step_ms": values.get("step_ms"),
            "train_loss": values.get("loss"),
            "bytes_down": answer.sent,
            "bytes_up": answer.size,
        }
        self.boards.append(row)
        self.selections.append((number, name, places))
        self.draw(number, {f"board/{key}": value for key, value in row.items() if key != "round"}, name)

    def coverage(self) -> float:
        """The share of all boards' rounds in which the least trained tensor trained."""
        counts = np.zeros(len(self._names))
        for _, _, places in self.selections:
            counts[places] += 1
        return float(counts.min() / len(self.selections)) if self.selections else 0.0

    def keep(self, model: keras.Model, score: float) -> bool:
        """Save the model, see `save_last_and_best`; whether it is the best so far."""
        from elastic_trainer.networks.saved_model import save_last_and_best

        is_best = save_last_and_best(model, self.folder, score, self.best)
        self.best = score if is_best else self.best
        return is_best

    def draw(self, number: int, values: dict[str, Any], board: str | None = None) -> None:
        """Write a point of TensorBoard's curves at a round, of the fleet or of a board."""
        import tensorflow as tf

        place = self.folder if board is None else self.folder / "boards" / (re.sub(r"[^\w.-]", "_", board) or "_")
        writer = self._writers.get(str(place))
        if writer is None:
            writer = self._writers[str(place)] = tf.summary.create_file_writer(str(place))
        with writer.as_default(step=number):
            for name, value in values.items():
                if isinstance(value, int | float):
                    tf.summary.scalar(name, float(value))
        writer.flush()

    def finish(self, config: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Write summary.json and delete the checkpoints; what it contains."""
        accuracies = [row["test_accuracy"] for row in self.rounds if row["test_accuracy"] is not None]
        testing = sum(row["validation_seconds"] for row in self.rounds)
        summary = {
            **{key: config.get(key) for key in ("model_name", "dataset_name", "train_type", "seed")},
            "epochs": len(self.rounds),
            "steps": max(self.rounds[-1]["step"], 1),
            "start_accuracy": self.rounds[0]["test_accuracy"],
            "best_accuracy": max(accuracies, default=0.0),
            "final_accuracy": accuracies[-1] if accuracies else 0.0,
            "train_seconds": max(seconds, 1e-3),
            "validation_seconds": testing,
            "selection_seconds": 0.0,
            "selection_percent": 0.0,
            "median_step_ms": None,
            "coverage": self.coverage(),
            "bytes_down": sum(row["bytes_down"] for row in self.rounds),
            "bytes_up": sum(row["bytes_up"] for row in self.rounds),
            "late": sum(row["late"] for row in self.rounds),
        }
        write_json(self.folder / SUMMARY, summary)
        self.checkpoints.clear()
        for writer in self._writers.values():
            writer.close()
        return summary
