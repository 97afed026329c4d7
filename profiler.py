"""Tensor Timing Profiler: what each tensor of a network costs to train (paper section 5).

    t_dw  time for the tensor's gradient, and for applying its update
    t_dy  time to pass the error gradient on to where this tensor is reached
    t_fw  forward time between this tensor and the one before it, which a step that trains it cannot take from a cache

`elastic_trainer.profiling.profile` takes four steps, each a module beside it:

    measure    the steps of a few selections (`measuring`), and a trace of full steps by tf.profiler (`trace`); or FLOPs
               stand in for the trace (`flops`), or a trace that another board recorded (`foreign_trace`)
    attribute  each operation's time to a tensor, by the data flow of the traced graph alone (`attribution`)
    fit        independent operations overlap, so a linear model turns operation times into wall time (`fit`)
    table      what the time budget asks later (`table`)

Command line: `python profiler.py --model_name … --input_size … --batch_size …` writes
logs/profiles/<model>_<input>_<classes>_<batch>/ with table.csv, profile.json, a chart, and the trace for TensorBoard.
With `--from_trace FILE` it measures nothing here, and plans for the board that FILE was recorded on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import utils
from elastic_trainer.cli.commands import parse_profiler
from elastic_trainer.profiling.measuring import idle_training
from elastic_trainer.profiling.profile import profile_task, table_of_trace
from elastic_trainer.settings import Settings
from elastic_trainer.system.errors import figure_text
from elastic_trainer.system.files import save_figure, writing
from elastic_trainer.system.machine import load_tensorflow
from elastic_trainer.timing.table import TimingTable
from elastic_trainer.timing.table_file import save_table, table_folder
from elastic_trainer.timing.trace import read_trace

if TYPE_CHECKING:
    import keras
    import numpy as np

UNRELIABLE_PERCENT = 15  # median error of predictions


def profile(model: keras.Model, settings: Settings, folder: Path) -> TimingTable:
    """The timing table of an image classifier, measured on a batch of noise. Its weights do not change.

    `folder` and errors are those of `profiling.profile.profile_task`.
    """
    return profile_task(idle_training(model, settings), folder, settings.seconds)


def draw_table(table: TimingTable, settings: Settings, stem: Path) -> None:
    """Bar charts of t_dw, t_dy and t_fw over the tensors in backward order, as `stem`.pdf and .png."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    upper, middle, lower = figure.subplots(3, 1, sharex=True)
    order = range(len(table.names))
    for axes, times, label, colour in (
        (upper, table.t_dw_ms, "$t_{dw}$: own gradient and update", "tab:blue"),
        (middle, table.t_dy_ms, "$t_{dy}$: passing the error on", "tab:orange"),
        (lower, table.t_fw_ms, "$t_{fw}$: forward pass from here to the tensor before", "tab:green"),
    ):
        axes.bar(order, times, width=0.9, color=colour)
        axes.set_ylabel("ms a step")
        axes.set_title(f"{label} ({times.sum():.1f} ms in all)", fontsize="medium")
    lower.set_xlabel("tensor, in backward order (0 is next to the output)")
    name, size = figure_text(settings.model_name), settings.input_size
    figure.suptitle(f"{name}, {size}×{size}, batch {settings.batch_size}: operation times")
    save_figure(figure, stem)


def _report(table: TimingTable, head: np.ndarray) -> Iterable[str]:
    full, details, fit = table.full_step_ms, table.details, table.fit
    yield f"full step {full:.1f} ms"
    sums = ", ".join(f"{name.replace('_', ' ')} {value:.1f}" for name, value in details["operation_ms"].items())
    beside = f" (each with {1e3 * fit.untraced_ms:.1f} µs beside its trace)" if fit.untraced_ms else ""
    yield f"operation times in ms{beside}: {sums}"
    yield f"operation time that matched no operation of the network: {details['unmatched_time_percent']:.2f} %"
    if fit.median_error_percent is None or fit.p95_error_percent is None:
        yield "predicted against measured step: not measured; operation times are added up"
    else:
        yield (
            f"predicted against measured step, each of {fit.selections} selections left out of its fit in turn, "
            f"{fit.rounds} rounds: median error {fit.median_error_percent:.1f} %, 95th percentile "
            f"{fit.p95_error_percent:.1f} %"
        )
        if fit.median_error_percent > UNRELIABLE_PERCENT:
            yield "warning: the timing table is unreliable: was the device busy? Profile again"
    if not details["operation_ms"]["updates"]:
        yield "the trace contains no update of the weights: its time is missing from the table"
    for name in details["tensors_without_gradient"]:
        yield f"warning: {name} has no influence on the loss and will never be selected"
    smallest = table.predict_ms(head) / full
    cached = table.predict_ms(head, misses=0.0) / full
    yield f"smallest feasible rho (the head alone): {smallest:.3f}; from cached features, once made: {cached:.3f}"


def main() -> None:
    """Run the command line. Raises `UserError` for what the user can fix."""
    settings = parse_profiler()
    load_tensorflow()

    import models
    from elastic_trainer.datasets.named import class_names
    from elastic_trainer.networks.tensors import head_mask
    from elastic_trainer.selection.plan import plan_lines

    path = settings.from_trace
    settings = replace(settings, num_classes=settings.num_classes or len(class_names(settings)))
    model = models.build(settings)
    folder = table_folder(settings, path)
    if path is None:
        table = _measured_table(model, settings, folder)
    else:
        table = table_of_trace(idle_training(model, settings), read_trace(path), path.name)
    save_table(table, settings, folder)
    draw_table(table, settings, folder / "timing")
    print("\n".join(_report(table, head_mask(model))))
    if path is not None:
        steps, planes = table.details["traced_steps"], ", ".join(table.details["planes"])
        print(f"{path.name}: {steps} complete iterations on {planes}")
        print("selections with equal importance of all tensors:")
        print("\n".join(plan_lines(table, head_mask(model))))
    print(f"timing table of {len(table.names)} tensors: {folder / 'table.csv'}; chart: {folder / 'timing.png'}")


def _measured_table(model: keras.Model, settings: Settings, folder: Path) -> TimingTable:
    """The table of this machine. Raises `UserError` if `folder` cannot be written, or memory does not suffice."""
    from elastic_trainer.networks.tensors import all_mask
    from elastic_trainer.profiling.memory_check import TracedSteps

    steps = TracedSteps(model, settings)
    steps.check(partial(steps.needed_mb, all_mask(model)), settings.batch_size)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        return profile(model, settings, folder)


if __name__ == "__main__":
    utils.run_cli(main)
