"""What a run chooses for itself: sizes that fit memory, a short timing table, and what a deadline leaves open."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path

import keras
import numpy as np

from elastic_trainer.cli.commands import HEAD_ALONE, TrainCommand, profiler_command
from elastic_trainer.datasets import images
from elastic_trainer.datasets.batches import part_rows
from elastic_trainer.datasets.image_data import ImageData
from elastic_trainer.errors import UserError
from elastic_trainer.files import writing
from elastic_trainer.memory.budget import MEASURED_SHARE, Needed
from elastic_trainer.networks.tensors import all_mask, head_mask, tensor_names
from elastic_trainer.options import duration_text
from elastic_trainer.registry import DATASETS, SCHEMES
from elastic_trainer.runs.reader import is_run
from elastic_trainer.selection.budget import (
    DEADLINE_RHO,
    DeadlineBudget,
    DeadlineTooShortError,
    RhoBudget,
    TimeBudget,
    make_budget,
)
from elastic_trainer.selection.run_time import RunTime
from elastic_trainer.selection.schemes import trainable_mask
from elastic_trainer.settings import TABLE_RECORD, NetworkSettings
from elastic_trainer.task import ImageClassification
from elastic_trainer.timing.graph_digest import graph_digest
from elastic_trainer.timing.measuring import NoTimeToMeasureError, idle_training
from elastic_trainer.timing.memory_check import TracedSteps
from elastic_trainer.timing.profiling import QUICK_SECONDS, profile_task
from elastic_trainer.timing.table import TimingTable
from elastic_trainer.timing.table_file import load_table, save_table, table_folder, table_settings

MIN_STEPS = 8  # an epoch, where the batch size is chosen
ENOUGH_STEPS = 600  # of a run whose epochs are chosen, however few images there are (docs/log/accuracy.md)
TABLE_SHARE = 0.4  # of the time left before a deadline, that measuring a short timing table may take
TABLE_TRACES = 30  # times tracing the forward pass: a short table takes more on any device (docs/log/deadlines.md)
NO_TIME = "there is no time to measure a timing table"
# What measuring a table takes over a full step, several of whose graphs are there at once, and beside it, as seen with
# MobileNetV2 and ResNet50 (docs/memory.md).
MEASURING_FACTOR, MEASURING_MB = 1.35, 180.0


def with_memory(command: TrainCommand, steps: TracedSteps) -> TrainCommand:
    """A copy with what the run chooses so that it fits: its batch, parts of it, and which images stay in memory.

    A batch whose size was not given is smaller where there are few images. Where memory is little, the robust recipe
    takes it in parts; other runs, and where no parts fit, take a smaller one. The memory is to suffice for what the
    scheme trains; of an elastic one for half of it, or for measuring the timing table if there is none. Within a limit,
    the robust recipe keeps images in memory as far as they fit beside that. An elastic run stays within what memory
    there is, unless a limit was given or it surely fits.

    Raises:
        UserError: even the least that the scheme may train does not fit, or measuring the table.
    """
    command, memory = _with_sizes(command, steps), steps.memory
    network, scheme, micro_batch = command.network, SCHEMES[command.train_type], command.training.micro_batch
    is_for_board = command.run.is_for_board
    if scheme.is_elastic and not memory.has_limit and not is_for_board and not steps.certainly_fit(network.batch_size):
        memory.limit_mb = memory.total_mb
        print(
            f"memory: selections stay within the {memory.limit_mb:,.0f} MB that there are (--memory sets another limit)"
        )
    has_table, is_fixed = _has_table(command.part, command), not scheme.is_elastic and scheme.takes("num_epochs")
    trains_less = "--train_type elastic_training_upper_part" if is_fixed and has_table else None
    what = "measuring the timing table of" if scheme.is_elastic and not has_table else "training"
    if not (is_for_board and has_table):
        needed = _needed(command, steps, is_least=True)
        steps.check(needed, network.batch_size, micro_batch, what, scheme.takes("micro_batch"), trains_less)
    return command


def _with_sizes(command: TrainCommand, steps: TracedSteps) -> TrainCommand:
    """See `with_memory`."""
    count_images = DATASETS[command.data.dataset_name].count_images if "batch_size" in command.open else None
    if count_images is not None:
        batch_size, count = command.network.batch_size, count_images(command.data.data_dir, command.data.test_fraction)
        while batch_size > 1 and batch_size * MIN_STEPS > count:
            batch_size //= 2
        command = command.choose(batch_size=batch_size)
    network, memory, needed, rows = command.network, steps.memory, _needed(command, steps), None
    batch_size, certainly_fits = network.batch_size, steps.certainly_fit(network.batch_size)
    if "micro_batch" in command.open:
        rows = batch_size if certainly_fits else memory.fitting_size(lambda size: needed(batch_size, size), batch_size)
        if rows is not None and rows < batch_size:
            print(f"memory: steps take {batch_size} images in parts of {rows} (--micro_batch sets other parts)")
        command = command.choose(micro_batch=None if rows == batch_size else rows)
    if count_images is not None and rows is None and not certainly_fits:
        parts = command.training.micro_batch or batch_size
        size = memory.fitting_size(lambda size: needed(size, parts), batch_size)
        command = command.choose(batch_size=size or 1)
    if command.run.recipe == "robust" and memory.has_limit and command.data.image_memory is None:
        batch_size = command.network.batch_size
        beside_mb = memory.room_mb - needed(batch_size, command.training.micro_batch or batch_size)
        command = replace(command, images_mb=min(max(beside_mb, 0.0), images.room_mb(None)))
    return command


def _needed(command: TrainCommand, steps: TracedSteps, is_least: bool = False) -> Needed:
    """MB that training takes by the sizes of a batch and of its parts, and measuring its timing table if there is none.

    An elastic scheme trains half of the tensors, or `is_least` the head.
    """
    network, is_elastic, model = command.network, SCHEMES[command.train_type].is_elastic, steps.model
    mask = trainable_mask(command.train_type, model, command.training.trained_layers)

    def needed(batch_size: int, micro_batch: int) -> float:
        part, trained = replace(network, batch_size=part_rows(batch_size, micro_batch)), mask
        has_table = not is_elastic or _has_table(part, command)
        if is_elastic:
            trained = head_mask(model)
            if has_table and not is_least:
                trained = trained | (np.arange(len(mask)) >= len(mask) // 2)
        training_mb = steps.needed_mb(trained, batch_size, micro_batch)
        return training_mb if has_table else max(training_mb, steps.needed_mb(mask, part.batch_size))

    return needed


def _has_table(part: NetworkSettings, command: TrainCommand) -> bool:
    """Whether there is a timing table of steps on a batch, or a part of one, like that of `part`."""
    return (table_folder(part, command.run.logdir) / TABLE_RECORD).is_file()


def with_table(
    command: TrainCommand, steps: TracedSteps, *, left: float = math.inf
) -> tuple[TrainCommand, TimingTable | None]:
    """The timing table of an elastic run; a short one is measured if there is none that can be relied on.

    A rho that is too small is refused here, before images are read for minutes.

    Args:
        command: the run. The copy takes no steps if a deadline leaves no time to measure a table.
        steps: of its network.
        left: seconds before a deadline.

    Raises:
        UserError: a deadline leaves no time to measure a table, and the number of epochs was given.
    """
    if not SCHEMES[command.train_type].is_elastic:
        return command, None
    network, run, settings, model = command.part, command.run, command.training, steps.model
    folder, remake = table_folder(network, run.logdir), profiler_command(network, command.data, run.logdir)
    start = time.perf_counter()
    shapes = [tuple(variable.shape) for variable in model.trainable_variables]
    graph = graph_digest(ImageClassification(model), network.batch_size)
    tracing, until = time.perf_counter() - start, start + TABLE_SHARE * left

    def load() -> TimingTable:
        wanted, names = table_settings(network), tensor_names(model)
        return load_table(folder, wanted, names, shapes, graph, remake, run.allow_stale_profile)

    table = load() if _has_table(network, command) else None
    # A run that is continued keeps the table that it started with, and deterministic runs agree only with one table.
    keeps_table = run.allow_stale_profile or run.deterministic or (run.resume and is_run(run.folder))
    used = "this run keeps it"
    if table is None or (table.doubt is not None and not keeps_table):
        try:
            if TABLE_TRACES * tracing > until - time.perf_counter():
                raise NoTimeToMeasureError
            found = "no timing table" if table is None else f"an unreliable timing table ({table.doubt})"
            print(f"{found} in {folder}: measuring a short one; a longer one: {remake}")
            _measure_table(command, steps, folder, until)
            used = "was the device busy? The next run measures again"
        except NoTimeToMeasureError as error:
            if table is None and "num_epochs" in command.open:
                return _without_steps(command, NO_TIME), None
            if table is None:
                deadline = duration_text(settings.deadline or 0.0)
                raise UserError(f"--deadline {deadline}: {NO_TIME}; first run: {remake}") from error
            used = f"{NO_TIME}, so it is used"
        # The new one is loaded: its file rounds times, and a resumed run compares its table with the checkpoint's.
        table = load()
    if table.doubt is not None:
        print(f"the timing table is unreliable: {table.doubt}; {used}")
    table = table.in_parts(command.network.batch_size // network.batch_size)
    if settings.deadline is None:  # whether features can be cached is not known yet
        RhoBudget(table, head_mask(model), settings.rho, 1.0 if settings.feature_cache == "off" else 0.0)
    if table.memory is None and command.options["memory"] is None:  # an earlier table cannot keep to a limit
        steps.memory.limit_mb = math.inf
    return command, table


def _measure_table(command: TrainCommand, steps: TracedSteps, folder: Path, until: float) -> None:
    """Measure a short timing table into `folder` until that time of `time.perf_counter`.

    Raises:
        NoTimeToMeasureError: the time does not suffice.
    """
    network, memory = command.part, steps.memory
    if not steps.certainly_fit(network.batch_size):
        expected_mb = MEASURING_FACTOR * steps.needed_mb(all_mask(steps.model), network.batch_size) + MEASURING_MB
        if not memory.fits(expected_mb):
            print(
                f"memory: measuring takes about {expected_mb:,.0f} MB for a short time, and {memory.room_mb:,.0f} MB "
                "are available; once there is a table, runs keep to the limit"
            )
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    training, wanted = idle_training(steps.model, network), table_settings(network)
    with memory.reusing(MEASURED_SHARE):
        save_table(profile_task(*training, wanted, folder, "trace", QUICK_SECONDS, quick_until=until), folder)


def with_budget(
    command: TrainCommand,
    model: keras.Model,
    dataset: ImageData,
    table: TimingTable | None,
    elapsed: float,
    end_seconds: float = 0.0,
) -> tuple[TrainCommand, TimeBudget | None]:
    """The time budget of an elastic run, and a copy of `command` with what a deadline leaves open.

    Args:
        command, model, dataset, table: of the run.
        elapsed: seconds of the deadline that have passed.
        end_seconds: of the deadline, kept for the export.

    Raises:
        UserError: as `make_budget`, where there is nothing to choose.
    """
    if table is None:
        return command, None
    given, chooses_epochs, deadline = command, "num_epochs" in command.open, command.training.deadline
    if chooses_epochs:
        assert deadline is not None
        run_time = RunTime.of(table, dataset, command.training, end_seconds)
        command = _with_fitting_epochs(command, dataset, table, run_time, deadline - elapsed - run_time.end)
    settings = command.training
    try:
        budget = make_budget(model, dataset, settings, table, elapsed, end_seconds)
    except DeadlineTooShortError:
        if not chooses_epochs:
            raise
        return _without_steps(given, "there is no time for training steps"), None
    if chooses_epochs:
        assert isinstance(budget, DeadlineBudget)
        budget.limit_rho(DEADLINE_RHO)
        length, selections = f"{settings.num_epochs} epochs", f"a selection every {settings.interval:g}"
        if settings.interval >= settings.num_epochs:
            most = min(_most_epochs(given, dataset), int(settings.interval))
            budget.lengthen_to(most * dataset.steps_per_epoch)
            length, selections = f"about {length}", "one selection"
        allowed = duration_text(settings.deadline or 0.0)
        print(f"--deadline {allowed}: {length}, {selections}; --num_epochs and --interval set other numbers")
    return command, budget


def _with_fitting_epochs(
    command: TrainCommand, dataset: ImageData, table: TimingTable, run_time: RunTime, seconds: float
) -> TrainCommand:
    """A copy with the epochs that fit into `seconds`, and their interval of selections."""
    settings, most = command.training, _most_epochs(command, dataset)
    interval = settings.interval if settings.interval < settings.num_epochs else math.inf
    epoch = DEADLINE_RHO * dataset.steps_per_epoch * table.full_step_ms / 1e3
    epochs, interval = run_time.fitting_epochs(seconds, epoch, most, interval, "interval" in command.open)
    chosen = {"num_epochs": epochs, "interval": min(interval, most)}
    return command.choose(**{name: value for name, value in chosen.items() if name in command.open})


def _most_epochs(command: TrainCommand, dataset: ImageData) -> int:
    """How many epochs are enough for a run whose epochs are chosen."""
    return max(command.training.num_epochs, math.ceil(ENOUGH_STEPS / dataset.steps_per_epoch))


def _without_steps(command: TrainCommand, why: str) -> TrainCommand:
    allowed = duration_text(command.training.deadline or 0.0)
    print(f"--deadline {allowed}: {why}; only the head is fitted, in closed form")
    return command.choose(**HEAD_ALONE)
