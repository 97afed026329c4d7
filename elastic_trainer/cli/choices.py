"""What a run chooses for itself: the batch size, a short timing table, and what a deadline leaves open."""

from __future__ import annotations

import math
from dataclasses import replace

import keras

from elastic_trainer.cli.commands import TrainCommand, profiler_command
from elastic_trainer.datasets.image_data import ImageData
from elastic_trainer.files import writing
from elastic_trainer.machine import resident_memory_mb
from elastic_trainer.memory.step_memory import freed_memory_mb
from elastic_trainer.networks.tensors import all_mask, head_mask, tensor_names
from elastic_trainer.registry import DATASETS, SCHEMES
from elastic_trainer.selection.deadline import (
    DEADLINE_RHO,
    DeadlineBudget,
    DeadlineTooShortError,
    deadline_epochs,
    start_seconds,
)
from elastic_trainer.selection.schemes import make_budget, trainable_mask
from elastic_trainer.selection.time_budget import TimeBudget, check_rho
from elastic_trainer.settings import TABLE_RECORD
from elastic_trainer.task import ImageClassification
from elastic_trainer.timing.graph_digest import graph_digest
from elastic_trainer.timing.measuring import idle_training
from elastic_trainer.timing.memory_check import check_limit, check_memory, fitting_batch, room_mb, surely_fits
from elastic_trainer.timing.profiling import QUICK_SECONDS, profile_task
from elastic_trainer.timing.table import TimingTable, load_table, table_folder, table_settings

MIN_STEPS = 8  # an epoch, where the batch size is chosen
ENOUGH_STEPS = 300  # of a run whose epochs are chosen, however few images there are
MIN_SECONDS_FOR_TABLE = 45  # left of a deadline; a short table takes 15 to 25
EXPORT_SECONDS = 20  # of a deadline, kept for the export


def with_memory(command: TrainCommand, model: keras.Model) -> TrainCommand:
    """A copy that keeps an elastic run within what memory there is, unless a limit was given or it surely fits.

    Raises:
        UserError: even the least that the scheme may train does not fit.
    """
    network, limit_mb, micro_batch = command.network, command.training.memory, command.training.micro_batch
    check_limit(limit_mb)
    mask = trainable_mask(command.train_type, model, command.training.trained_layers)
    if SCHEMES[command.train_type].is_elastic:
        mask = head_mask(model)
        available_mb = room_mb()
        if limit_mb is None and not surely_fits(model, network.batch_size, available_mb):
            limit_mb = (resident_memory_mb() or 0.0) + available_mb
            print(f"memory: selections stay within the {limit_mb:,.0f} MB that there are (--memory sets another limit)")
            command = replace(command, training=replace(command.training, memory=limit_mb))
    has_table = (table_folder(command.part, command.run.logdir) / TABLE_RECORD).is_file()
    is_fixed = not SCHEMES[command.train_type].is_elastic and not SCHEMES[command.train_type].is_closed_form
    trains_less = "--train_type elastic_training_upper_part" if has_table and is_fixed else None
    check_memory(model, network, mask, limit_mb, trains_less=trains_less, micro_batch=micro_batch)
    return command


def with_batch_size(command: TrainCommand, model: keras.Model) -> TrainCommand:
    """A copy with a smaller batch, unless its size was given, where there are few images or little memory.

    The memory is to suffice for what the scheme may train; of an elastic one that has a timing table, for half of it.
    """
    count_images = DATASETS[command.data.dataset_name].count_images
    if not command.chooses_batch or count_images is None:
        return command
    batch_size, count = command.network.batch_size, count_images(command.data.data_dir, command.data.test_fraction)
    while batch_size > 1 and batch_size * MIN_STEPS > count:
        batch_size //= 2
    command = command.with_batch(batch_size)
    mask = trainable_mask(command.train_type, model, command.training.trained_layers)
    has_table = (table_folder(command.part, command.run.logdir) / TABLE_RECORD).is_file()
    if SCHEMES[command.train_type].is_elastic and has_table:
        mask[: len(mask) // 2] = False
    settings = command.training
    return command.with_batch(fitting_batch(model, command.network, mask, settings.memory, settings.micro_batch))


def with_table(
    command: TrainCommand, model: keras.Model, elapsed: float
) -> tuple[TrainCommand, TimingTable | None, float]:
    """The timing table of an elastic run; a short one is measured if there is none.

    A rho that is too small is refused here, before images are read for minutes.

    Args:
        command: the run. The copy takes no steps if a deadline leaves no time to measure a table.
        model: its network.
        elapsed: seconds of the deadline that have passed.

    Returns:
        The command, the table, and MB of memory that measuring took and that training takes again.
    """
    if not SCHEMES[command.train_type].is_elastic:
        return command, None, 0.0
    network, run, settings = command.part, command.run, command.training
    folder, remake = table_folder(network, run.logdir), profiler_command(network, command.data, run.logdir)
    wanted, before_mb, freed_mb = table_settings(network), resident_memory_mb(), 0.0
    if not (folder / TABLE_RECORD).is_file():
        if command.chooses_epochs and (settings.deadline or math.inf) - elapsed < MIN_SECONDS_FOR_TABLE:
            return _without_steps(command, "there is no timing table, and no time to measure one"), None, 0.0
        print(f"no timing table in {folder}: measuring a short one; a longer one: {remake}")
        check_memory(model, network, all_mask(model), settings.memory, "measuring the timing table of")
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        training = idle_training(model, network)
        profile_task(*training, wanted, folder, "trace", QUICK_SECONDS, is_quick=True).save(folder)
        freed_mb = freed_memory_mb(before_mb, resident_memory_mb())
    # A new one, too: its file rounds times, and a resumed run compares its table with that of the checkpoint.
    shapes = [tuple(variable.shape) for variable in model.trainable_variables]
    graph = graph_digest(ImageClassification(model), network.batch_size)
    table = load_table(folder, wanted, tensor_names(model), shapes, graph, remake, run.allow_stale_profile)
    table = table.in_parts(command.network.batch_size // network.batch_size)
    if settings.deadline is None:  # whether features can be cached is not known yet
        check_rho(table, head_mask(model), settings.rho, 1.0 if settings.feature_cache == "off" else 0.0)
    if table.memory is None and command.options["memory"] is None:  # an earlier table cannot keep to a limit
        command = replace(command, training=replace(settings, memory=None))
    return command, table, freed_mb


def with_budget(
    command: TrainCommand, model: keras.Model, dataset: ImageData, table: TimingTable | None, elapsed: float
) -> tuple[TrainCommand, TimeBudget | None]:
    """The time budget of an elastic run, and a copy of `command` with what a deadline leaves open.

    Args:
        command, model, dataset, table: of the run.
        elapsed: seconds of the deadline that have passed.

    Raises:
        UserError: as `make_budget`, where there is nothing to choose.
    """
    if table is None:
        return command, None
    given, end_seconds = command, EXPORT_SECONDS if command.run.export else 0.0
    chooses_epochs, deadline = command.chooses_epochs, command.training.deadline
    if chooses_epochs:
        assert deadline is not None
        command = _with_fitting_epochs(command, dataset, table, deadline - elapsed - end_seconds)
    settings = command.training
    features_possible = settings.feature_cache != "off"
    try:
        budget = make_budget(model, dataset, settings, table, features_possible, elapsed, end_seconds)
    except DeadlineTooShortError:
        if not chooses_epochs:
            raise
        return _without_steps(given, "there is no time for training steps"), None
    if chooses_epochs:
        assert isinstance(budget, DeadlineBudget)
        budget.limit_rho(DEADLINE_RHO)
        selections = "one selection"
        if settings.interval < settings.num_epochs:
            selections = f"a selection every {settings.interval:g}"
        print(
            f"--deadline {deadline:g}: {settings.num_epochs} epochs, {selections}; --num_epochs and "
            "--interval set other numbers"
        )
    return command, budget


def _with_fitting_epochs(command: TrainCommand, dataset: ImageData, table: TimingTable, seconds: float) -> TrainCommand:
    """A copy with the epochs that fit into `seconds`, and their interval of selections."""
    settings = command.training
    epochs, interval = deadline_epochs(
        table,
        max(seconds - start_seconds(table, dataset, settings), 1.0),
        dataset.steps_per_epoch,
        dataset.test_batches,
        max(settings.num_epochs, math.ceil(ENOUGH_STEPS / dataset.steps_per_epoch)),
        settings.interval if settings.interval < settings.num_epochs else math.inf,
        may_lengthen=command.chooses_interval,
        validation_share=settings.validation_share,
    )
    return command.with_epochs(epochs, min(interval, epochs))


def _without_steps(command: TrainCommand, why: str) -> TrainCommand:
    print(f"--deadline {command.training.deadline:g}: {why}; only the head is fitted, in closed form")
    return command.with_closed_form()
