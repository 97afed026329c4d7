"""The results of a run as summary.json keeps them, and as one line says them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from elastic_trainer.selection.select import SELECTION_PARTS

if TYPE_CHECKING:  # so that a finished run is reported without TensorFlow
    from elastic_trainer.runs.history import History
    from elastic_trainer.task import Score


MIN_STEPS = 10  # measured ones, for a ratio of a run's time
MIN_SHARE = 0.5  # of training time that the measured steps must take; compiling takes the rest


def run_results(history: History, planned_steps: int, score: Score) -> dict[str, Any]:
    """What summary.json holds of a finished run.

    Args:
        history: of the run.
        planned_steps: of the schedule; a deadline may have left time for fewer.
        score: says which model is best.

    Returns:
        Accuracies in 0…1, times in seconds, memory in MB, energy in J (or null), FLOPs (two for each
        multiply-accumulate), time over that of full training (or null, and why).
    """
    step_ms, full_ms = history.step_ms, history.full_training_ms()
    values = [row[f"test_{score.name}"] for row in history.validated]
    predicted_mb = [interval.selection.memory_mb for interval in history.intervals]
    training, selection = (history.clocks.seconds(name) for name in ("training", "selection"))
    return {
        "epochs": len(history.epochs),
        "steps": history.step,
        "planned_steps": planned_steps,
        f"start_{score.name}": history.start[score.name] if history.start else None,
        "starts_with_head": history.starts_with_head,
        f"best_{score.name}": (max if score.is_higher_better else min)(values, default=None),
        f"final_{score.name}": values[-1] if values else None,
        "train_seconds": training,
        "validation_seconds": history.clocks.seconds("validation"),
        "selection_seconds": selection,
        "selection_percent": 100 * selection / training,
        "selection_part_seconds": _selection_part_seconds(history),
        "feature_seconds": history.making_ms / 1e3,
        "first_model_seconds": history.first_model_seconds,
        "average_head_seconds": history.average_head_seconds,
        "elapsed_seconds": history.clocks.elapsed(),
        "median_step_ms": float(np.median(step_ms)) if step_ms else None,
        "rho_measured": (sum(step_ms) + history.making_ms) / full_ms if full_ms else None,
        **_time_over_full(history, 1e3 * training, full_ms),
        "train_flops": history.flops(),
        "predicted_memory_mb": max((one for one in predicted_mb if one is not None), default=None),
        "peak_memory_mb": _peak(history, "peak_memory_mb"),
        "gpu_peak_memory_mb": _peak(history, "gpu_peak_memory_mb"),
        "energy_joules": history.clocks.joules,
        "training_spans": history.clocks.spans,
    }


def _time_over_full(history: History, training_ms: float, full_ms: float | None) -> dict[str, Any]:
    """All of training time, selecting included, over that of full training as it would have run; or why there is none.

    Full training compiles too, which nothing measured here. So the ratio is of use only where compiling takes little.

    Args:
        history: of the run.
        training_ms: of all steps.
        full_ms: of full training, for the measured steps; None without a budget.
    """
    step_ms, ratio = history.step_ms, None
    measured_share = (sum(step_ms) + history.making_ms) / training_ms
    if full_ms is None:
        missing = "no step was measured within a time budget"
    elif len(step_ms) < MIN_STEPS or measured_share < MIN_SHARE:
        missing = (
            f"the run is too short: {len(step_ms)} steps were measured without compiling and took "
            f"{measured_share:.0%} of training time; {MIN_STEPS} and {MIN_SHARE:.0%} are needed"
        )
    else:
        missing, ratio = None, training_ms / (full_ms / len(step_ms) * history.step)
    return {"time_over_full": ratio, "time_over_full_missing": missing}


def _selection_part_seconds(history: History) -> dict[str, float]:
    """Seconds of all selections by part, see `Selection.seconds`."""
    each = [interval.selection.seconds for interval in history.intervals]
    return {part: sum(seconds.get(part, 0.0) for seconds in each) for part in SELECTION_PARTS}


def _peak(history: History, column: str) -> float | None:
    """The largest value of a column of metrics.csv (a resumed run is another process with a separate peak)."""
    return max((row[column] for row in history.epochs if row[column] is not None), default=None)


def summary_line(summary: dict[str, Any], deadline: float | None) -> str:
    """What a person wants to know of a finished run; `deadline` in seconds, or None."""
    seconds, step_ms, rho = summary["train_seconds"], summary["median_step_ms"], summary.get("rho_measured")
    step = f", median step {step_ms:.1f} ms" if step_ms else ""
    if rho:
        asked = f"{summary.get('rho', math.nan):g}" if deadline is None else "what the deadline allows"
        ratio, missing = summary.get("time_over_full"), summary.get("time_over_full_missing")
        time = f"{ratio:.2f}× estimated full-training time; " if ratio else ""
        step += f"; {time}steps {rho:.2f}× full-training steps (asked: {asked})"
        step += f"; no estimate of full-training time: {missing}" if missing else ""
    if deadline is not None:
        step += f", {summary.get('elapsed_seconds') or seconds:.0f} s of the {deadline:.0f} s allowed"
        planned = summary.get("planned_steps") or 0
        if summary["steps"] < planned:
            step += f", which left time for {summary['steps']} of {planned} steps"
    start = summary.get("start_accuracy")
    if start is not None:
        first = "the closed-form head" if summary.get("starts_with_head") else "the model that training started from"
        if start >= summary["best_accuracy"]:
            step += f"; no epoch was better than {first} ({start:.1%}): best.keras is that model"
        elif summary.get("starts_with_head"):
            step += f"; {first} alone: {start:.1%}"
    return (
        f"accuracy {summary['final_accuracy']:.1%} (best {summary['best_accuracy']:.1%}), trained for "
        f"{seconds:.1f} s ({seconds / 3600:.2g} h), {summary['selection_percent']:.1f} % of it on selecting and "
        f"compiling{step}"
    )


def time_line(summary: dict[str, Any]) -> str:
    """Where the wall time of a run went, in seconds; empty if that is not known, as for a resumed run."""
    reached = summary.get("seconds_after_start") or {}
    if not reached.get("first_step") or not reached.get("end"):
        return ""
    parts, before = [], 0.0
    for name, key in (("loading TensorFlow", "tensorflow"), ("timing table", "table"), ("reading images", "images")):
        if reached.get(key) is not None:
            parts.append((name, reached[key] - before))
            before = reached[key]
    selecting, making = summary["selection_seconds"], summary.get("feature_seconds") or 0.0
    averaging = summary.get("average_head_seconds") or 0.0
    parts += [
        ("first model", summary.get("first_model_seconds") or 0.0),
        ("selecting and compiling", selecting),
        ("making features", making),
        ("training steps", summary["train_seconds"] - selecting - making - averaging),
        ("averaging the head", averaging),
        ("validation", summary["validation_seconds"]),
    ]
    parts.append(("everything else", reached["end"] - sum(seconds for _, seconds in parts)))
    shown = ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts if seconds >= 0.05)
    return f"{reached['end']:.1f} s in all: {shown}; the first step ended after {reached['first_step']:.1f} s"
