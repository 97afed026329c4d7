"""The results of a run as summary.json keeps them, and as three lines say them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from elastic_trainer.runs.reader import SUMMARY, read_summary
from elastic_trainer.settings import BEST_MODEL
from elastic_trainer.settings.flags import duration_text
from elastic_trainer.system.files import write_record
from elastic_trainer.timing.wall_time import slowdown_of_steps

if TYPE_CHECKING:  # so that a finished run is reported without TensorFlow
    from elastic_trainer.engine.task import Score
    from elastic_trainer.runs.history import History
    from elastic_trainer.selection.select import Selection


MIN_PART = 0.05  # of the wall time of a run; what took less is not named


def run_results(history: History, score: Score) -> dict[str, Any]:
    """What summary.json holds of a finished run; `score` says which of its models is best.

    Accuracies are in 0…1, memory in MB, energy in J. FLOPs count two for each multiply-accumulate.
    """
    step_ms, full_ms = [ms for one in history.selections for ms in one.step_ms], full_training_ms(history.selections)
    start = history.start[score.name] if history.start else None
    tested: list[dict[str, Any]] = [] if start is None else [{"epoch": 0, f"test_{score.name}": start}]
    tested += history.validated
    best_epoch, best = _best(tested, history.saved_score, score)

    from elastic_trainer.selection.select import SELECTION_PARTS  # imports Keras; this module is also for mistakes

    return {
        "epochs": len(history.epochs),
        "steps": history.step,
        f"start_{score.name}": start,
        "starts_with_head": history.starts_with_head,
        f"best_{score.name}": best,
        "best_epoch": best_epoch,
        f"final_{score.name}": tested[-1][f"test_{score.name}"] if tested else None,
        "train_seconds": history.clocks.seconds("training"),
        "validation_seconds": history.clocks.seconds("validation"),
        "selection_seconds": history.clocks.seconds("selection"),
        "selection_part_seconds": {
            part: sum(one.seconds.get(part, 0.0) for one in history.selections) for part in SELECTION_PARTS
        },
        "feature_seconds": history.caching_ms / 1e3,
        "first_model_seconds": history.first_model_seconds,
        "average_head_seconds": history.average_head_seconds,
        "elapsed_seconds": history.clocks.elapsed(),
        "median_step_ms": float(np.median(step_ms)) if step_ms else None,
        "rho_measured": (sum(step_ms) + history.caching_ms) / full_ms if full_ms else None,
        "train_flops": history.train_flops,
        "predicted_memory_mb": max(filter(None, (one.memory_mb for one in history.selections)), default=None),
        # A resumed run is another process with another peak.
        **{
            name: max(filter(None, (row[name] for row in history.epochs)), default=None)
            for name in ("peak_memory_mb", "gpu_peak_memory_mb")
        },
        "energy_joules": history.clocks.joules,
        "training_spans": history.clocks.spans,
        "clock_shift": history.clocks.clock_shift,
    }


def full_training_ms(selections: Sequence[Selection]) -> float | None:
    """What full training, as it would have run, takes for the measured steps with a budget; None without one.

    Each stretch of a selection's steps has the slowdown that was measured in it; without gradient passes, they have
    that of the selection.
    """
    total_ms = 0.0
    for each in selections:
        full_ms, count = each.full_step_ms or 0.0, len(each.step_ms)
        if each.slowdown and each.slowdowns:
            total_ms += full_ms / each.slowdown * float(slowdown_of_steps(each.slowdowns, count).sum())
        else:
            total_ms += full_ms * count
    return total_ms or None


def _best(tested: list[dict[str, Any]], saved: float | None, score: Score) -> tuple[int | None, float | None]:
    """The epoch and the result of the model that was saved as the best; of the best one tested if none was saved.

    Epoch 0 is the model that training started from.
    """
    scores = [score.of(row, "test_") for row in tested]
    if not scores:
        return None, None
    best = tested[scores.index(saved if saved in scores else max(scores))]
    return best["epoch"], best[f"test_{score.name}"]


def update_summary(folder: Path, **values: Any) -> None:
    """Add what is known only after training to summary.json of a finished run."""
    write_record(folder / SUMMARY, {**read_summary(folder), **values})


def result_lines(summary: dict[str, Any], folder: Path, deadline: float | None = None) -> list[str]:
    """What a person wants to know of a finished run: accuracy and file, time, and what to do next; a line each.

    `deadline` is in seconds, if the run had one.
    """
    lines = [_accuracy_line(summary, folder)]
    if summary.get("test_accuracy") is not None:
        tested, images = summary["tested"], summary["test_images"]
        lines.append(
            f"test accuracy of {tested}: {summary['test_accuracy']:.1%} on {images} images not used to choose it"
        )
    return [*lines, _time_line(summary, deadline), _next_line(summary, folder, deadline)]


def _accuracy_line(summary: dict[str, Any], folder: Path) -> str:
    best, final, epoch = summary["best_accuracy"], summary["final_accuracy"], summary["best_epoch"]
    first = "the closed-form head" if summary["starts_with_head"] else "the model that training started from"
    after = f"after epoch {epoch} of {summary['epochs']}" if epoch else f"with {first}"
    if not (folder / BEST_MODEL).is_file():
        better = f" (best: {best:.1%} {after})" if best > final else ""
        return f"accuracy {final:.1%}{better}; no model was saved"
    last = f"; after the last epoch: {final:.1%}" if final != best else ""
    alone = f"; {first} alone: {summary['start_accuracy']:.1%}" if epoch and summary["starts_with_head"] else ""
    return f"accuracy {best:.1%} {after}: {folder / BEST_MODEL}{last}{alone}"


def _time_line(summary: dict[str, Any], deadline: float | None) -> str:
    """The wall time, and what took at least `MIN_PART` of it."""
    seconds = summary.get("wall_seconds") or summary["elapsed_seconds"]
    selecting, making = summary["selection_seconds"], summary["feature_seconds"]
    averaging = summary["average_head_seconds"] or 0.0
    parts = {
        "first model": summary["first_model_seconds"],
        "selecting and compiling": selecting,
        "making features": making,
        "training steps": summary["train_seconds"] - selecting - making - averaging,
        "averaging the head": averaging,
        "validation": summary["validation_seconds"],
    }
    long = {name: part for name, part in parts.items() if part >= MIN_PART * seconds}
    long["other"] = seconds - sum(long.values())
    text = f"time: {duration_text(seconds)}" + (f" of the {duration_text(deadline)} allowed" if deadline else "")
    text += f" ({', '.join(f'{name} {duration_text(part)}' for name, part in long.items())})"
    if summary["rho_measured"]:
        asked = f" (asked: {summary['rho']:g})" if deadline is None and summary.get("rho") else ""
        text += f"; a step took {summary['rho_measured']:.2f} of a full step{asked}"
    return text


def _next_line(summary: dict[str, Any], folder: Path, deadline: float | None) -> str:
    text = "next: give --save_model to keep the model of such a run"
    if (folder / BEST_MODEL).is_file():
        text = f"next: {shlex.join(['python', 'main.py', '--evaluate', str(folder)])} shows what it gets wrong"
    if deadline is not None and not summary["steps"]:
        before = duration_text(summary["elapsed_seconds"])
        text += f"; there was no time for a training step: what comes before the first one takes {before} here"
    return text
