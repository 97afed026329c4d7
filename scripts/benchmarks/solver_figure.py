"""The figure of benchmark_solver.py: six panels, from the object that it prints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from made_up_networks import RESNET50_TENSORS

from elastic_trainer.files import save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RESOLUTIONS = (100, 1_000, 10_000, 100_000)
# Colours that colour-blind readers can distinguish and that differ in greyscale; each also has its own marker.
STYLES = (("#000000", "o"), ("#0072b2", "s"), ("#d55e00", "^"), ("#e69f00", "D"), ("#777777", "v"))


def draw(record: dict[str, Any], stem: Path) -> None:
    """Six panels of the object that benchmark_solver.py prints: against the recursion, over T_q, and over N."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 10), layout="constrained")
    panels = [figure.add_subplot(3, 2, place) for place in range(1, 7)]
    draw_against_recursion(record, panels[0], "subproblems", "subproblems solved", "a  Work, T_q = 1,000")
    draw_against_recursion(record, panels[1], "ms", "time (ms)", "b  Time, T_q = 1,000")
    draw_trade(record, panels[2])
    draw_quality(record, panels[3])
    draw_over_tensors(record, panels[4], "solve_ms", "time (ms)", "e  Solver's time")
    draw_over_tensors(record, panels[5], "peak_memory_mb", "peak memory (MB)", "f  Solver's memory")
    save_figure(figure, stem)


def draw_against_recursion(record: dict[str, Any], axes: Axes, quantity: str, label: str, title: str) -> None:
    """Bars of the paper's recursion and of ours, a pair for each N."""
    rows = record["recursions"]
    places = np.arange(len(rows))
    for shift, method, name, colour, hatch in (
        (-0.2, "recursion", "recursion of the paper", "#bbbbbb", "//"),
        (0.2, "solve", "ours", "#0072b2", ""),
    ):
        heights = [row[f"{method}_{quantity}"] for row in rows]
        bars = axes.bar(places + shift, heights, 0.4, label=name, color=colour, hatch=hatch, edgecolor="black")
        axes.bar_label(bars, [short(height) for height in heights], fontsize=8)
    axes.set_yscale("log")
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom / 3, top * 30)  # the smallest bar stays visible, and the legend is above the largest
    axes.set_xticks(places, [f"N = {row['tensors']}" for row in rows])
    axes.set_ylabel(label)
    axes.set_title(title, loc="left")
    axes.legend(loc="upper left", fontsize=9, ncols=2)


def short(number: float) -> str:
    """At least two digits, as text for a bar."""
    if number >= 1e6:
        return f"{number / 1e6:.1f} M"
    return f"{number:,.0f}" if number >= 10 else f"{number:#.2g}"


def draw_trade(record: dict[str, Any], axes: Axes) -> None:
    """Resulting time and the solver's time over T_q, at ResNet50's size."""
    rows = record["over_time_resolution"]
    steps = [row["time_resolution"] for row in rows]
    (share,) = axes.plot(steps, [row["time_share_of_full_percent"] for row in rows], "ko-", markersize=5)
    axes.axhline(100 * record["rho"], color="black", linestyle=":", linewidth=1)
    axes.annotate("budget", (steps[0], 100 * record["rho"]), (0, 4), textcoords="offset points")
    axes.set_ylim(0, 100)
    axes.set_xscale("log")
    axes.set_xlabel("time steps T_q")
    axes.set_ylabel("resulting time (% of full)")
    other = axes.twinx()
    (cost,) = other.plot(steps, [row["solve_ms"] for row in rows], "s--", color="#d55e00", markersize=5)
    other.set_yscale("log")
    other.set_ylim(0.1, 1000)
    other.set_ylabel("solver's time (ms)")
    axes.legend((share, cost), ("resulting time (left)", "solver's time (right)"), loc="lower right", fontsize=9)
    axes.set_title(f"c  Resolution, N = {RESNET50_TENSORS}", loc="left")


def draw_quality(record: dict[str, Any], axes: Axes) -> None:
    """Mean importance lost to rounding, over T_q. A large open marker is at the T_q that the solver chooses itself."""
    floor = 1e-5  # smaller losses, which are rounding errors of floats, are drawn here
    for (colour, marker), quality in zip(STYLES, record["quality"], strict=False):
        lost = [max(100 - row["mean_share_of_optimum_percent"], floor) for row in quality["shares"]]
        size = quality["tensors"]
        label = f"N = {size:,}" + (" (upper bound)" if size in record["milp_unproven_tensors"] else "")
        axes.plot(RESOLUTIONS, lost[:-1], marker + "-", color=colour, markersize=5, label=label)
        chosen = quality["automatic_time_resolution"]
        axes.plot(chosen, lost[-1], marker, markersize=11, markerfacecolor="none", color=colour)
    axes.plot([], [], "o", markersize=11, markerfacecolor="none", color="black", label="T_q automatic")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(floor / 6, 1e6)  # room for the legend
    axes.set_yticks(
        [1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1, 10, 100], ["0", "0.0001", "0.001", "0.01", "0.1", "1", "10", "100"]
    )
    axes.set_xlabel("time steps T_q")
    axes.set_ylabel("importance lost (% of optimum)")
    axes.set_title("d  Against the exact optimum", loc="left")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right", fontsize=9)


def draw_over_tensors(record: dict[str, Any], axes: Axes, key: str, label: str, title: str) -> None:
    """A quantity of `solve` over N, a line for each T_q and one for the automatic choice."""
    choices = [*((f"T_q = {steps:,}", steps) for steps in RESOLUTIONS), ("T_q automatic", None)]
    for (colour, marker), (name, steps) in zip(STYLES, choices, strict=True):
        rows = [
            run
            for run in record["runs"]
            if (run["automatic"] if steps is None else run["time_resolution"] == steps and not run["automatic"])
        ]
        line = "--" if steps is None else "-"
        values = [row[key] for row in rows]
        axes.plot([row["tensors"] for row in rows], values, marker + line, color=colour, markersize=5, label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(top=axes.get_ylim()[1] * 30)  # room for the legend
    axes.set_xlabel("tensors N")
    axes.set_ylabel(label)
    axes.set_title(title, loc="left")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", fontsize=8, ncols=2)
