"""Train one network under one scheme: `python main.py --model_name … --dataset_name … --train_type …`.

It connects the steps of one run: train, `--resume`, `--evaluate`, `--export`. Every flag is a field in
elastic_trainer/settings.py; docs/flags.md lists them. The results of a run are in logs/<run_name>/.
"""

from __future__ import annotations

import contextlib
import math
import shlex
import signal
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import utils
from elastic_trainer.cli.commands import EvaluateCommand, TrainCommand
from elastic_trainer.cli.evaluate_command import parse_evaluation
from elastic_trainer.cli.train_command import parse_main
from elastic_trainer.errors import Stopped, UserError
from elastic_trainer.machine import load_tensorflow, seconds_since_start
from elastic_trainer.networks.names import is_custom_model
from elastic_trainer.registry import EXPORTERS
from elastic_trainer.runs.checkpoint import Checkpoints
from elastic_trainer.runs.config import (
    FREE_ON_RESUME,
    changed_class,
    changed_images,
    compare_networks,
    first_change,
    network_record,
)
from elastic_trainer.runs.folder import check_run_folder, run_folder
from elastic_trainer.runs.reader import is_finished, is_run, read_config, read_summary
from elastic_trainer.runs.summary import result_lines, update_summary
from elastic_trainer.settings import BEST_MODEL

# Of a deadline, kept for the export, in times of converting the model once: two files, and checking them.
EXPORT_CONVERSIONS = 3

if TYPE_CHECKING:
    import keras

    from elastic_trainer.datasets.image_data import ImageData
    from elastic_trainer.trainer import Trainer


def main() -> None:
    """Run the command line. Raises `UserError` for mistakes that the user can fix."""
    start = time.perf_counter() - (seconds_since_start() or 0.0)
    command = parse_main()
    if isinstance(command, EvaluateCommand):
        load_tensorflow()
        evaluate(command)
        return
    if command.extra.get("load_board"):
        load_tensorflow()
        from elastic_trainer.extensions.board.export import load_board

        print(load_board(command.extra["load_board"]))
        return
    for text in command.warnings:
        utils.warn(text)
    run = command.run
    if run.resume and is_run(run.folder):
        command = command.with_choices_of(read_config(run.folder))
        _check_unchanged(command)
        if is_finished(run.folder):
            with run_folder(run.logdir, run.run_name, resume=True) as folder:
                _finish_again(command, folder)
            return
    load_tensorflow()
    train_run(command, start)


def train_run(command: TrainCommand, start: float | None = None) -> None:
    """Train one run, new or continued, and write the other results that the command asks for.

    Args:
        command: the run.
        start: when the program started, by `time.perf_counter`; a deadline counts from there. Default: now.
    """
    import data
    import models
    import train
    from elastic_trainer.cli.choices import with_budget, with_memory, with_table
    from elastic_trainer.datasets.image_data import leave_out_trained, write_trained_images
    from elastic_trainer.datasets.sources import class_names
    from elastic_trainer.memory.budget import MemoryBudget
    from elastic_trainer.networks.tensors import head_mask, tensor_names
    from elastic_trainer.runs.disk import disk_line, disk_need
    from elastic_trainer.runs.run_log import RunLog
    from elastic_trainer.runs.stop_signals import StopSignals
    from elastic_trainer.selection.budget import DEADLINE_RHO
    from elastic_trainer.selection.plan import COMPARED_RHOS, run_plan_lines
    from elastic_trainer.timing.memory_check import TracedSteps

    start = time.perf_counter() if start is None else start
    run, images = command.run, command.data
    reached: dict[str, float | None] = {"tensorflow": time.perf_counter() - start}
    if run.deterministic:
        import tensorflow as tf

        tf.config.experimental.enable_op_determinism()
    check_run_folder(run.logdir, run.run_name, run.overwrite, run.resume)
    names = class_names(images)
    command = command.with_classes(len(names))
    is_untrained = run.export is not None and EXPORTERS[run.export].is_untrained
    if is_untrained and not run.plan:
        from elastic_trainer.extensions.board.export import board_folder, check_folder

        check_folder(board_folder(run))
    model = models.build(command.network, names)
    network_of_user = network_record(model) if is_custom_model(command.network.model_name) else None
    if network_of_user is not None:
        compare_networks(network_of_user, command.run, command.network)
    _check_saving(model, command)
    steps = TracedSteps(model, command.network, MemoryBudget(command.training.memory))
    command = with_memory(command, steps)
    _check_unchanged(command)
    network = command.network
    need = disk_need(model, network, command.training.save_model, bool(run.export))
    disk = disk_line(need, run.logdir, run.folder if run.resume or run.overwrite else None)
    left = (command.training.deadline or math.inf) - (time.perf_counter() - start)
    command, table = with_table(command, steps, left=left)
    end_seconds = 0.0 if table is None else _export_seconds(command, model)
    if command.extra.get("board_times") and table is not None:
        from elastic_trainer.extensions.board.times import board_table

        table = board_table(table, command.extra["board_times"], network.batch_size)
    reached["table"] = time.perf_counter() - start if table is not None else None
    sizes = network.input_size, network.batch_size, network.seed, network.num_classes
    dataset = data.load(command.data, *sizes, command.images_mb)
    earlier_images = leave_out_trained(dataset, Path(network.weights), "--weights")
    _check_unchanged(command, dataset)
    reached["images"] = time.perf_counter() - start
    chooses_epochs = "num_epochs" in command.open
    command, budget = with_budget(command, model, dataset, table, time.perf_counter() - start, end_seconds)
    settings = command.training
    if budget is not None and (settings.deadline is None or chooses_epochs):
        rho, others = (settings.rho if settings.deadline is None else DEADLINE_RHO), COMPARED_RHOS if run.plan else ()
        plan = run_plan_lines(budget.table, head_mask(model), dataset, settings, rho, others, steps.memory)
        print("\n".join(plan if is_untrained and not run.plan else [*plan, disk]))
    if run.plan:
        if budget is None or (settings.deadline is not None and not chooses_epochs):
            print("--plan: there is none for this --deadline; leave out --num_epochs, or give it more time")
        return
    if is_untrained:
        from elastic_trainer.extensions.board.command import export_untrained

        print(export_untrained(command, model, dataset, table))
        return
    with run_folder(run.logdir, run.run_name, run.overwrite, run.resume) as folder:
        if is_finished(folder):  # another process has finished it in the meantime
            _finish_again(command, folder)
            return
        print(
            f"{command.train_type} of {network.model_name} on {images.dataset_name}: {dataset.counts}, "
            f"{network.num_classes} classes; run folder {folder}"
        )
        config = {**command.config, "images": dataset.record(), "network": network_of_user}
        with RunLog(folder, config, tensor_names(model), reached) as log, StopSignals() as stop:
            write_trained_images(folder, dataset.training_digests, earlier_images)
            more = budget, stop, time.perf_counter() - start, steps.memory
            results = train.train(command.train_type, model, dataset, settings, log, *more)
            log.finish(results)
            clocks = log.trainer.history.clocks
        utils.run_each(
            lambda: _add_power(command, folder),
            lambda: _export_best(command, model, dataset.held_out or dataset, folder, log.trainer),
            lambda: update_summary(folder, wall_seconds=clocks.elapsed()),
            lambda: _report(folder, settings.deadline),
        )


def _export_seconds(command: TrainCommand, model: keras.Model) -> float:
    """Seconds of a deadline to keep for the export, by a first conversion; 0 without a deadline.

    Raises:
        UserError: the model cannot be converted, which is better said before training.
    """
    entry = EXPORTERS[command.run.export] if command.run.export else None
    if command.training.deadline is None or entry is None or entry.conversion_seconds is None:
        return 0.0
    return EXPORT_CONVERSIONS * entry.conversion_seconds(model)


def _check_saving(model: keras.Model, command: TrainCommand) -> None:
    """Raise `UserError` for a custom model that `--save_model` or `--export` cannot save."""
    from elastic_trainer.networks.saved_model import check_saving

    if command.training.save_model and is_custom_model(command.network.model_name):
        export = command.run.export
        check_saving(model, f"--export {export}" if export else "--save_model", changes_shape=False)


def _export_best(command: TrainCommand, model: keras.Model, dataset: ImageData, folder: Path, trainer: Trainer) -> None:
    """Write the run's best model in the format of `--export`, if given. Raises `UserError` if the run saved none.

    Args:
        command, model, folder: of the run.
        dataset: its test images check the files.
        trainer: of the run; a deadline says how long the check may take.
    """
    if not command.run.export:
        return
    from elastic_trainer.networks.saved_model import load_best

    best = folder / BEST_MODEL
    if not best.is_file():
        raise UserError(
            f"--export {command.run.export}: {folder} contains no best.keras; no epoch ended after --export or "
            "--save_model was given"
        )
    with _stoppable_export(best):
        model = load_best(model, best, trainer.training.model is not model, "--export")
        seconds = (command.training.deadline or math.inf) - trainer.history.clocks.elapsed()
        print(_exported(command.run.export, model, dataset, folder, str(best), seconds))


@contextlib.contextmanager
def _stoppable_export(best: Path) -> Iterator[None]:
    """In this block Ctrl-C raises `Stopped`: the run is finished, and its best model is not exported yet."""
    try:
        yield
    except KeyboardInterrupt:
        again = f"{best} is complete; to export it: {shlex.join(['python', 'main.py', '--resume', str(best.parent)])}"
        raise Stopped(signal.SIGINT, f"stopped in the export; {again}") from None


def _exported(
    name: str, model: keras.Model, dataset: ImageData, folder: Path, source: str, seconds: float = math.inf
) -> str:
    """Write a trained model in the format `name`, `seconds` before a deadline. Returns the text to print."""
    entry = EXPORTERS[name]
    more = {} if entry.conversion_seconds is None else {"seconds": seconds}
    return entry.export(model, dataset, folder, source, **more)


def evaluate(command: EvaluateCommand) -> None:
    """Report the results of a model for each class, and export it if `--export` is given."""
    from elastic_trainer.evaluation.class_report import write_report
    from elastic_trainer.evaluation.predictions import predict

    model, dataset = load_to_evaluate(command)
    print(f"{command.model} on {dataset.name}: {dataset.test_count} test images, {dataset.num_classes} classes")
    start = time.perf_counter()
    predictions = predict(model, dataset)
    record = {
        "model": str(command.model),
        "dataset_name": dataset.name,
        "data_dir": str(command.data.data_dir) if command.data.data_dir else None,
        "input_size": dataset.input_size,
        "outputs": model.output_shape[-1],
        "seconds": time.perf_counter() - start,
    }
    print(write_report(predictions, dataset.class_names, command.folder / "evaluation", record))
    if command.export and EXPORTERS[command.export].is_untrained:
        from elastic_trainer.extensions.board.command import export_last_selection

        print(export_last_selection(command, model, dataset))
    elif command.export:
        print(_exported(command.export, model, dataset, command.folder, str(command.model)))


def load_to_evaluate(command: EvaluateCommand) -> tuple[keras.Model, ImageData]:
    """The model to evaluate, from images [batch, size, size, 3] in 0…255 to logits, and the data set at that size.

    Raises:
        UserError: the file contains no model, or the model does not suit the data set or the options.
    """
    import data
    import models
    from elastic_trainer.datasets.image_data import leave_out_trained, trained_images
    from elastic_trainer.datasets.sources import find_to_test
    from elastic_trainer.evaluation.loading import (
        fixed_input_size,
        network_of_source,
        saved_network,
        with_checked_outputs,
    )
    from elastic_trainer.settings import defaults_of

    images = command.data
    source = find_to_test(images, command.class_names, trained_images(command.model))
    _check_class_names(command, source.class_names)
    classes = len(source.class_names)
    default_size = defaults_of(images.dataset_name)["input_size"]
    model = saved_network(command.model, command.model_name)
    if model is not None:
        size = fixed_input_size(model, command.input_size, command.model) or default_size
    else:
        name, size = str(command.model_name), command.input_size or default_size
        build = partial(models.build_model, name, size, command.num_classes or classes)
        model = network_of_source(command.model, name, build, command.seed, command.trained_network)
    model = with_checked_outputs(model, size, command.model, images.dataset_name, classes, command.num_classes)
    dataset = data.load(images, size, command.batch_size, command.seed, command.num_classes, source=source)
    leave_out_trained(dataset, command.model, "--evaluate")
    return model, dataset


def _check_class_names(command: EvaluateCommand, names: Sequence[str]) -> None:
    """Raise `UserError` if the model to evaluate was trained on classes with other names."""
    change = changed_class(names, command.class_names or names)
    if change is not None:
        raise UserError(
            f"--evaluate {command.model}: was trained with {change}; give images of the same classes, in folders with "
            "the same names"
        )


# --- finished runs, and results after training ------------------------------------------------------------------------


def _check_unchanged(command: TrainCommand, dataset: ImageData | None = None) -> None:
    """Raise `UserError` if a run to continue was started with other options, or with other images than `dataset`."""
    folder = command.run.folder
    if not command.run.resume or not is_run(folder):
        return
    before = read_config(folder)
    change = first_change(command.config, before, FREE_ON_RESUME)
    if change is None and dataset is not None:
        change = changed_images(dataset.record(), before.get("images"))
    if change is not None:
        raise UserError(
            f"--resume: the run in {folder} was started with {change}; use the same, or give another --run_name"
        )


def _finish_again(command: TrainCommand, folder: Path) -> None:
    """Write results of the finished run in `folder` that may be missing, and print what it came to."""
    summary = read_summary(folder)
    Checkpoints(folder / "checkpoints").clear()
    utils.run_each(
        lambda: _add_power(command, folder),
        lambda: _export_again(command, folder, summary.get("wall_seconds")),
        lambda: print(end=f"{folder} is finished: "),
        lambda: _report(folder, command.training.deadline),
    )


def _export_again(command: TrainCommand, folder: Path, seconds: float | None) -> None:
    """Write the export that a finished run lacks, as one that was stopped in it; the run has taken `seconds` so far."""
    best, export = folder / BEST_MODEL, command.run.export
    if export is None or not best.is_file() or (folder / EXPORTERS[export].files[-1]).exists():
        return
    with _stoppable_export(best):
        load_tensorflow()
        images = [] if command.data.data_dir is None else ["--data_dir", str(command.data.data_dir)]
        model, dataset = load_to_evaluate(parse_evaluation(["--evaluate", str(folder), *images]))
        print(_exported(export, model, dataset, folder, str(best)))
    if seconds is not None:
        update_summary(folder, wall_seconds=seconds + (seconds_since_start() or 0.0))


def _report(folder: Path, deadline: float | None) -> None:
    print(*result_lines(read_summary(folder), folder, deadline), sep="\n")


def _add_power(command: TrainCommand, folder: Path) -> None:
    record = command.extra.get("power_csv")
    if record is not None:
        load_tensorflow()
        from elastic_trainer.extensions.energy.power_record import add_external_energy

        print(f"energy of training: {add_external_energy(folder, record):.6g} J")


if __name__ == "__main__":
    utils.run_cli(main)
