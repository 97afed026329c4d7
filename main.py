"""Train one network under one scheme: `python main.py --model_name … --dataset_name … --train_type …`.

It connects the steps of one run: train, `--resume`, `--evaluate`, `--export`. Every flag is a field in
elastic_trainer/settings.py; docs/flags.md lists them. The results of a run are in logs/<run_name>/.
"""

from __future__ import annotations

import math
import shlex
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import utils
from elastic_trainer.cli.commands import EvaluateCommand, TrainCommand, continued
from elastic_trainer.cli.evaluate_command import parse_evaluation
from elastic_trainer.cli.train_command import parse_main
from elastic_trainer.errors import Stopped, UserError
from elastic_trainer.machine import load_tensorflow, seconds_since_start
from elastic_trainer.networks.names import is_custom_model
from elastic_trainer.registry import EXPORTERS, SCHEMES
from elastic_trainer.runs.checkpoint import Checkpoints
from elastic_trainer.runs.folder import check_run_folder, run_folder
from elastic_trainer.runs.reader import METRICS, SUMMARY, is_finished, read_summary
from elastic_trainer.runs.summary import result_lines, update_summary
from elastic_trainer.settings import BEST_MODEL

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
    for text in command.warnings:
        utils.warn(text)
    command = continued(command)
    run = command.run
    if run.resume and is_finished(run.folder):
        with run_folder(run.logdir, run.run_name, resume=True) as folder:
            _finish_again(command, folder)
        return
    load_tensorflow()
    train_run(command, start)


def train_run(command: TrainCommand, start: float | None = None) -> None:
    """Train one run, new or continued, and write the other results that the command asks for.

    A deadline counts from `start`, when the program started, by `time.perf_counter`; default: now.
    """
    import data
    import models
    import train
    from elastic_trainer.cli.resolve import resolve
    from elastic_trainer.datasets.image_data import leave_out_trained, trained_images, write_trained_images
    from elastic_trainer.datasets.sources import check_available, class_names
    from elastic_trainer.networks.saved_model import check_saving
    from elastic_trainer.networks.tensors import tensor_names
    from elastic_trainer.runs.run_log import RunLog
    from elastic_trainer.runs.stop_signals import StopSignals

    start = time.perf_counter() if start is None else start
    run, weights = command.run, Path(command.network.weights)
    reached: dict[str, float | None] = {"tensorflow": time.perf_counter() - start, "table": None}
    if run.deterministic:
        import tensorflow as tf

        tf.config.experimental.enable_op_determinism()
    check_run_folder(run.logdir, run.run_name, run.resume)
    check_available(command.data)
    names = class_names(command.data)
    command = command.with_classes(len(names))
    exporter = EXPORTERS[run.export] if run.export else None
    if exporter and not run.plan:
        exporter.check(run)
    model = models.build(command.network, names)
    if command.training.save_model and is_custom_model(command.network.model_name):
        check_saving(model, f"--export {run.export}" if run.export else "--save_model", changes_shape=False)

    def load(command: TrainCommand, images_mb: float | None) -> ImageData:
        network, is_elastic = command.network, SCHEMES[command.train_type].is_elastic
        reached["table"] = time.perf_counter() - start if is_elastic else None
        sizes = network.input_size, network.batch_size, network.seed, network.num_classes
        images = data.load(command.data, *sizes, images_mb)
        leave_out_trained(images, weights, "--weights")
        reached["images"] = time.perf_counter() - start
        return images

    prepared = resolve(command, model, load, start)
    command, dataset = prepared.command, prepared.data
    is_exported_now = exporter is not None and exporter.is_untrained and not run.plan
    if prepared.plan:
        print(*prepared.plan, sep="\n")
    if run.plan:
        if not prepared.plan:
            print("--plan: there is none for this --deadline; leave out --num_epochs, or give it more time")
        return
    if exporter and is_exported_now:
        print(exporter.export(command, model, dataset, prepared.table))
        return
    with run_folder(run.logdir, run.run_name, run.resume) as folder:
        if is_finished(folder):  # another process has finished it in the meantime
            _finish_again(command, folder)
            return
        print(
            f"{command.train_type} of {command.network.model_name} on {dataset.name}: {dataset.counts}, "
            f"{command.network.num_classes} classes; run folder {folder}"
        )
        if command.run.save_txt:
            print(f"--save_txt: accuracy and time are text in {folder / METRICS} and {folder / SUMMARY}")
        config = {**command.config, "images": dataset.record()}
        with RunLog(folder, config, tensor_names(model), reached) as log, StopSignals() as stop:
            write_trained_images(folder, dataset.training_digests, trained_images(weights))
            more = prepared.budget, stop, time.perf_counter() - start, prepared.memory
            train.train(command.train_type, model, dataset, command.training, log, *more)
            clocks = log.trainer.history.clocks
        utils.run_each(
            lambda: _export_best(command, model, dataset.held_out or dataset, folder, log.trainer),
            lambda: update_summary(folder, wall_seconds=clocks.elapsed()),
            lambda: _report(folder, command.training.deadline),
        )


def _export_best(command: TrainCommand, model: keras.Model, dataset: ImageData, folder: Path, trainer: Trainer) -> None:
    """Write the run's best model in the format of `--export`, if given; test images of `dataset` check the files."""
    if not command.run.export:
        return
    from elastic_trainer.networks.saved_model import load_best

    best = folder / BEST_MODEL
    if not best.is_file():
        raise UserError(
            f"--export {command.run.export}: {folder} contains no best.keras; no epoch ended after --export or "
            "--save_model was given"
        )
    model = load_best(model, best, trainer.training.model is not model, "--export")
    seconds = (command.training.deadline or math.inf) - trainer.history.clocks.elapsed()
    print(_exported(command.run.export, model, dataset, best, seconds))


def _exported(name: str, model: keras.Model, dataset: ImageData, best: Path, seconds: float = math.inf) -> str:
    """Write the best model of a finished run in the format `name`, `seconds` before a deadline; the text to print."""
    try:
        return EXPORTERS[name].export(model, dataset, best.parent, str(best), seconds)
    except KeyboardInterrupt:
        again = f"{best} is complete; to export it: {shlex.join(['python', 'main.py', '--resume', str(best.parent)])}"
        raise Stopped(signal.SIGINT, f"stopped in the export; {again}") from None


def evaluate(command: EvaluateCommand) -> None:
    """Report the results of a model for each class, and export it if `--export` is given."""
    from elastic_trainer.evaluation.class_report import report

    model, dataset = load_to_evaluate(command)
    print(f"{command.model} on {dataset.name}: {dataset.test_count} test images, {dataset.num_classes} classes")
    print(report(command, model, dataset))
    exporter = EXPORTERS[command.export] if command.export else None
    if exporter and exporter.is_untrained:
        print(exporter.export(command, model, dataset))
    elif exporter:
        print(exporter.export(model, dataset, command.folder, str(command.model)))


def load_to_evaluate(command: EvaluateCommand) -> tuple[keras.Model, ImageData]:
    """The model to evaluate and its data set."""
    import data
    import models
    from elastic_trainer.evaluation import loading

    return loading.load_to_evaluate(command, models.build_model, data.load)


# --- finished runs, and results after training ------------------------------------------------------------------------


def _finish_again(command: TrainCommand, folder: Path) -> None:
    """Write results of the finished run in `folder` that may be missing, and print what it came to."""
    summary = read_summary(folder)
    Checkpoints(folder / "checkpoints").clear()
    utils.run_each(
        lambda: _export_again(command, folder, summary.get("wall_seconds")),
        lambda: print(end=f"{folder} is finished: "),
        lambda: _report(folder, command.training.deadline),
    )


def _export_again(command: TrainCommand, folder: Path, seconds: float | None) -> None:
    """Write the export that a finished run lacks, as one that was stopped in it; the run has taken `seconds` so far."""
    best, export = folder / BEST_MODEL, command.run.export
    if export is None or not best.is_file() or (folder / EXPORTERS[export].file).exists():
        return
    load_tensorflow()
    images = [] if command.data.data_dir is None else ["--data_dir", str(command.data.data_dir)]
    model, dataset = load_to_evaluate(parse_evaluation(["--evaluate", str(folder), *images]))
    print(_exported(export, model, dataset, best))
    if seconds is not None:
        update_summary(folder, wall_seconds=seconds + (seconds_since_start() or 0.0))


def _report(folder: Path, deadline: float | None) -> None:
    print(*result_lines(read_summary(folder), folder, deadline), sep="\n")


if __name__ == "__main__":
    utils.run_cli(main)
