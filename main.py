"""Train one network under one scheme: `python main.py --model_name … --dataset_name … --train_type …`.

It connects the steps of one run: train, `--resume`, `--evaluate`, `--export`. Every flag is a field in
elastic_trainer/settings/__init__.py; docs/flags.md lists them. The results of a run are in logs/<run_name>/.
"""

from __future__ import annotations

import math
import shlex
import signal
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import utils
from elastic_trainer.cli.checks import is_for_board
from elastic_trainer.cli.commands import parse_main, results_folder, to_evaluate
from elastic_trainer.cli.exporters import EXPORTERS
from elastic_trainer.evaluation.text_table import text_table
from elastic_trainer.runs.folder import run_folder
from elastic_trainer.runs.reader import goes_on, is_finished, read_summary, trained_classes
from elastic_trainer.runs.summary import result_lines, update_summary
from elastic_trainer.settings import BEST_MODEL, PRESETS, Settings, preset_table
from elastic_trainer.settings.network_names import is_custom_model
from elastic_trainer.system.errors import Stopped, UserError
from elastic_trainer.system.machine import load_tensorflow, seconds_since_start

if TYPE_CHECKING:
    import keras

    from elastic_trainer.cli.resolve import Prepared
    from elastic_trainer.datasets.image_data import ImageData
    from elastic_trainer.runs.run_log import RunLog
    from elastic_trainer.runs.trainer import Trainer


def main() -> None:
    """Run the command line. Raises `UserError` for mistakes that the user can fix."""
    start = time.perf_counter() - (seconds_since_start() or 0.0)
    settings = parse_main()
    if settings.evaluate is None:
        train_run(settings, start)
    else:
        load_tensorflow()
        evaluate(settings)


def train_run(settings: Settings, start: float | None = None) -> None:
    """Train one run, new or resumed, and write the other results that the settings ask for.

    Args:
        settings: of the run.
        start: when the program started, by `time.perf_counter`; a deadline counts from there. Default: now.
    """
    if settings.resume and is_finished(settings.folder) and not goes_on(settings):
        with run_folder(settings.logdir, settings.run_name, resume=True) as finished:
            _finish_again(settings, finished)
        return
    load_tensorflow()

    import train
    from elastic_trainer.datasets.image_data import trained_images, write_trained_images
    from elastic_trainer.networks.tensors import tensor_names
    from elastic_trainer.runs.deadline import MARGIN
    from elastic_trainer.runs.engine import first_mask
    from elastic_trainer.runs.run_log import RunLog

    start = time.perf_counter() if start is None else start
    if settings.deterministic:
        import tensorflow as tf

        tf.config.experimental.enable_op_determinism()
    trains = not (settings.plan or is_for_board(settings))
    with ExitStack() as stack:
        place = settings.logdir, settings.run_name, settings.resume
        folder = stack.enter_context(run_folder(*place)) if trains else None
        model, prepared = _prepare(settings, start)
        settings, dataset = prepared.settings, prepared.data
        if folder is None:
            if not settings.plan:
                mask = first_mask(model, dataset, settings, prepared.table)
                print(EXPORTERS[str(settings.export)].export(settings, model, dataset, mask))
            return
        print(
            f"{settings.train_type} of {settings.model_name} on {dataset.name}: {dataset.counts}, "
            f"{settings.num_classes} classes; run folder {folder}"
        )
        config = {**settings.to_record(), "images": dataset.record()}
        with RunLog(folder, config, tensor_names(model)) as log:
            write_trained_images(folder, dataset.training_digests, trained_images(Path(settings.weights)))
            if settings.deadline is not None and settings.export is not None:  # a first conversion says what it takes
                dataset.export_seconds = MARGIN * EXPORTERS[settings.export].conversion_seconds(model)
            test = cache(partial(_images_to_test, settings, dataset, log))
            train.train(
                settings.train_type, model, dataset, settings, log, prepared.table, start, prepared.memory, test
            )
            clocks = log.trainer.history.clocks
        try:
            _export_best(settings, model, test() or dataset, folder, log.trainer)
        finally:
            update_summary(folder, wall_seconds=clocks.elapsed())
            _report(folder, settings.deadline)


def _prepare(settings: Settings, start: float) -> tuple[keras.Model, Prepared]:
    """The network of a run, and what else it needs to start; prints what it chose and, with `--plan`, the plan."""
    import data
    import models
    from elastic_trainer.cli.resolve import choose_network, resolve
    from elastic_trainer.datasets.image_data import leave_out_trained
    from elastic_trainer.datasets.named import find
    from elastic_trainer.networks.saved_model import check_saving

    source = find(settings)  # which downloads it: what is missing is said at once
    names, weights = source.class_names, Path(settings.weights)
    settings = replace(settings, num_classes=len(names))
    left = (settings.deadline or math.inf) - (time.perf_counter() - start)
    settings = choose_network(settings, source, models.build, left)
    if is_for_board(settings) and not settings.plan:
        from elastic_trainer.board.export import board_folder, check_folder

        check_folder(board_folder(settings))
    model = models.build(settings, names)
    if settings.save_model and is_custom_model(settings.model_name):
        check_saving(model, f"--export {settings.export}" if settings.export else "--save_model", changes_shape=False)

    def load(settings: Settings, images_mb: float | None) -> ImageData:
        images = data.load(settings, images_mb, source)
        leave_out_trained(images, weights, "--weights")
        return images

    prepared = resolve(settings, model, source.training_count, load)
    if settings.plan:
        print(*text_table(preset_table({"this run": prepared.settings, **PRESETS})), sep="\n")
    if prepared.plan:
        print(*prepared.plan, sep="\n")
    return model, prepared


def _images_to_test(settings: Settings, dataset: ImageData, log: RunLog) -> ImageData | None:
    """The images of a run's data set by which nothing is chosen, as `--evaluate` reads them; None if there are none.

    Before a deadline, as many as there is time for.
    """
    import data
    from elastic_trainer.datasets.image_data import leave_out_trained
    from elastic_trainer.datasets.named import find_to_test

    deadline = log.trainer.deadline
    most = dataset.tested_later if deadline is None else deadline.fitting_tests()
    if most < dataset.tested_later:
        again = shlex.join(["python", "main.py", "--evaluate", str(log.folder)])
        print(f"tested on {most} of {dataset.tested_later} images: time is short; {again} tests it on all")
    if not most:
        return None
    try:
        source = find_to_test(settings, dataset.class_names)
        source = source._replace(test=source.test.some(most))
        images = data.load(settings, None if settings.memory is None else 0.0, source)
        leave_out_trained(images, log.folder, "the run in")
    except UserError as error:  # such as that all are broken, or copies: the run is complete nevertheless
        print(f"warning: not tested: {error}")
        return None
    images.max_rows = dataset.max_rows
    return images


def _export_best(settings: Settings, model: keras.Model, dataset: ImageData, folder: Path, trainer: Trainer) -> None:
    """Write the run's best model in the format of `--export`, if given; test images of `dataset` check the files."""
    if not settings.export:
        return
    from elastic_trainer.networks.saved_model import load_best

    best = folder / BEST_MODEL
    if not best.is_file():
        raise UserError(
            f"--export {settings.export}: {folder} contains no best.keras; no epoch ended after --export or "
            "--save_model was given"
        )
    model = load_best(model, best, trainer.training.model is not model, "--export")
    seconds = (settings.deadline or math.inf) - trainer.history.clocks.elapsed()
    try:
        print(EXPORTERS[settings.export].export(model, dataset, folder, str(best), seconds, trainer.data))
    except KeyboardInterrupt:
        again = f"{best} is complete; to export it: {shlex.join(['python', 'main.py', '--resume', str(folder)])}"
        raise Stopped(signal.SIGINT, f"stopped in the export; {again}") from None


def evaluate(settings: Settings) -> None:
    """Report the results of a model for each class, and export it if `--export` is given."""
    from elastic_trainer.evaluation.class_report import report

    model, dataset = load_to_evaluate(settings)
    folder = results_folder(settings)
    print(f"{settings.evaluate} on {dataset.name}: {dataset.test_count} test images, {dataset.num_classes} classes")
    print(report(settings, model, dataset, folder / "evaluation"))
    if settings.export is not None:
        print(EXPORTERS[settings.export].export(model, dataset, folder, str(settings.evaluate)))


def load_to_evaluate(settings: Settings) -> tuple[keras.Model, ImageData]:
    """The model of `--evaluate` and its data set."""
    import data
    import models
    from elastic_trainer.evaluation import loading

    path = settings.evaluate
    assert path is not None, "--evaluate"
    return loading.load_to_evaluate(settings, path, trained_classes(path), models.build_model, data.load)


def _finish_again(settings: Settings, folder: Path) -> None:
    """Evaluate the finished run in `folder` if it lacks its export, as after Ctrl-C in it; print what it came to."""
    export = settings.export
    try:
        if export is not None and (folder / BEST_MODEL).is_file() and not (folder / EXPORTERS[export].file).exists():
            load_tensorflow()
            evaluate(to_evaluate({"evaluate": folder, "export": export, "data_dir": settings.data_dir}))
    finally:
        print(end=f"{folder} is finished: ")
        _report(folder, settings.deadline)


def _report(folder: Path, deadline: float | None) -> None:
    print(*result_lines(read_summary(folder), folder, deadline), sep="\n")


if __name__ == "__main__":
    utils.run_cli(main)
