"""What a run chooses for itself: the sizes of its steps, a timing table, its images' memory, and its length.

Sizes are chosen before the table, since they decide which one it is; the table before images are read, since a rho that
is too small is then refused before minutes of reading; the number of epochs after that, by how many images there are.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import keras
import numpy as np

from elastic_trainer.cli.commands import HEAD_ALONE, TrainCommand, continued, profiler_command
from elastic_trainer.datasets import images
from elastic_trainer.datasets.batches import part_rows
from elastic_trainer.datasets.image_data import ImageData
from elastic_trainer.errors import UserError
from elastic_trainer.files import writing
from elastic_trainer.memory.budget import MEASURED_SHARE, MemoryBudget, Needed
from elastic_trainer.networks.tensors import all_mask, head_mask, tensor_names
from elastic_trainer.options import duration_text
from elastic_trainer.registry import DATASETS, EXPORTERS, RETIMED, SCHEMES
from elastic_trainer.runs.reader import is_run
from elastic_trainer.selection.budget import RhoBudget, TimeBudget, first_misses, smallest_rho
from elastic_trainer.selection.deadline import DEADLINE_RHO, DeadlineBudget, DeadlineTooShortError, RunTime
from elastic_trainer.selection.elastic import make_budget
from elastic_trainer.selection.plan import RunPlanner
from elastic_trainer.selection.schemes import trainable_mask
from elastic_trainer.settings import TABLE_RECORD, NetworkSettings
from elastic_trainer.task import ImageClassification
from elastic_trainer.timing.graph_digest import graph_digest
from elastic_trainer.timing.measuring import NoTimeToMeasureError, idle_training
from elastic_trainer.timing.memory_check import TracedSteps
from elastic_trainer.timing.profiling import QUICK_SECONDS, profile_task
from elastic_trainer.timing.table import TimingTable
from elastic_trainer.timing.table_file import load_table, other_tables, save_table, table_folder, table_settings

MIN_STEPS = 8  # an epoch, where the batch size is chosen
ENOUGH_STEPS = 600  # of a run whose epochs are chosen, however few images there are (docs/log/accuracy.md)
TABLE_SHARE = 0.2  # of a deadline, that measuring a short timing table may take
TABLE_TRACES = 8  # times tracing the forward pass: any timing table takes more (docs/log/deadlines.md)
NO_TIME = "there is no time to measure a timing table"
# Measuring a table takes this factor of a full step's memory, since several of its graphs exist at once, and this much
# more, as seen with MobileNetV2 and ResNet50 (docs/memory.md).
MEASURING_FACTOR, MEASURING_MB = 1.35, 180.0
# Times converting the model once, kept of a deadline for its export. Two files and their checks took 2.6, and 3.5 to
# 4.9 where two other programs started meanwhile.
EXPORT_CONVERSIONS = 5

Load = Callable[[TrainCommand, float | None], ImageData]


@dataclass(frozen=True)
class Prepared:
    """A run that can start."""

    command: TrainCommand  # with nothing left open
    data: ImageData
    memory: MemoryBudget
    table: TimingTable | None = None  # of an elastic scheme, as the budget
    budget: TimeBudget | None = None
    plan: Iterable[str] = ()  # lines; none without a budget, and where a deadline and the epochs are given


def resolve(command: TrainCommand, model: keras.Model, load: Load, start: float | None = None) -> Prepared:
    """Choose what `command` leaves open.

    Args:
        command: the run. One that continues reuses the choices recorded in its folder.
        model: its network.
        load: reads its images, for the command as chosen so far, and how many MB of them may stay in memory
            (None: see `datasets.images.read`).
        start: when the program started, by `time.perf_counter`; a deadline counts from there. Default: now.

    Raises:
        UserError: the least that the scheme may train does not fit into memory, into its time budget or before its
            deadline; or the run to continue was started with other options or images.
    """
    start = time.perf_counter() if start is None else start
    command = continued(command)
    steps = TracedSteps(model, command.network, MemoryBudget(command.training.memory))
    command = _choose_sizes(command, steps)
    _check_memory(command, steps)
    images_mb, table, export_seconds = _images_mb(command, steps), None, 0.0
    if SCHEMES[command.train_type].is_elastic:
        left = (command.training.deadline or math.inf) - (time.perf_counter() - start)
        command, table = _find_table(command, steps, left)
    if table is not None:
        export_seconds = _export_seconds(command, model)
        for name in RETIMED:
            if command.options[name]:
                table = RETIMED[name](table, command.options[name], command.network.batch_size)
    data = load(command, images_mb)
    continued(command, data.record())
    if table is None:
        return Prepared(command, data, steps.memory)
    is_planned = command.training.deadline is None or "num_epochs" in command.open
    command, budget = _choose_length(command, model, data, table, time.perf_counter() - start, export_seconds)
    plan: Iterable[str] = ()
    if budget is not None and is_planned:
        settings = command.training
        rho = settings.rho if settings.deadline is None else DEADLINE_RHO
        planner = RunPlanner(table, head_mask(model), data, settings, steps.memory)
        plan = planner.lines(rho) if command.run.plan else [planner.line(rho)]
    return Prepared(command, data, steps.memory, table, budget, plan)


# --- sizes that fit into memory ---------------------------------------------------------------------------------------


def _choose_sizes(command: TrainCommand, steps: TracedSteps) -> TrainCommand:
    """Choose the batch and its parts: small where there are few images, and where memory is little.

    The robust recipe then takes the batch in parts; other runs, and where no parts fit, take a smaller one. The memory
    is to suffice for what the scheme trains; of an elastic one for half of it, or for measuring its timing table.
    """
    memory, chooses_batch = steps.memory, "batch_size" in command.open
    if chooses_batch:
        count_images = DATASETS[command.data.dataset_name].count_images
        assert count_images is not None, "the batch is open only for data sets that have it"
        batch_size, count = command.network.batch_size, count_images(command.data.data_dir, command.data.test_fraction)
        while batch_size > 1 and batch_size * MIN_STEPS > count:
            batch_size //= 2
        command = command.choose(batch_size=batch_size)
    batch_size, needed, rows = command.network.batch_size, _needed(command, steps), None
    if steps.certainly_fit(batch_size):
        return command
    if "micro_batch" in command.open:
        rows = memory.fitting_size(lambda size: needed(batch_size, size), batch_size)
        if rows is not None and rows < batch_size:
            print(f"memory: steps take {batch_size} images in parts of {rows} (--micro_batch sets other parts)")
        command = command.choose(micro_batch=None if rows == batch_size else rows)
    if chooses_batch and rows is None:
        parts = command.training.micro_batch or batch_size
        command = command.choose(batch_size=memory.fitting_size(lambda size: needed(size, parts), batch_size) or 1)
    return command


def _check_memory(command: TrainCommand, steps: TracedSteps) -> None:
    """Raise `UserError` if the least that the scheme may train does not fit, or measuring its timing table.

    An elastic run stays within what memory there is, unless a limit was given or it certainly fits.
    """
    network, scheme, memory = command.network, SCHEMES[command.train_type], steps.memory
    has_table = _has_table(command.part, command)
    is_limited = memory.has_limit or command.trains_elsewhere
    if scheme.is_elastic and not is_limited and not steps.certainly_fit(network.batch_size):
        memory.limit_mb = memory.total_mb
        print(
            f"memory: selections stay within the {memory.limit_mb:,.0f} MB that there are (--memory sets another limit)"
        )
    if command.trains_elsewhere and has_table:  # its times come without its memory
        return
    is_fixed = not scheme.is_elastic and scheme.takes("num_epochs")
    trains_less = "--train_type elastic_training_upper_part" if is_fixed and has_table else None
    what = "measuring the timing table of" if scheme.is_elastic and not has_table else "training"
    needed, micro_batch = _needed(command, steps, is_least=True), command.training.micro_batch
    steps.check(needed, network.batch_size, micro_batch, what, scheme.takes("micro_batch"), trains_less)


def _images_mb(command: TrainCommand, steps: TracedSteps) -> float | None:
    """What a given limit leaves for images, with the robust recipe; None if nothing says it."""
    settings = command.training
    if command.run.recipe != "robust" or settings.memory is None:
        return None
    batch_size = command.network.batch_size
    beside_mb = steps.memory.room_mb - _needed(command, steps)(batch_size, settings.micro_batch or batch_size)
    return min(max(beside_mb, 0.0), images.room_mb())


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


# --- the timing table -------------------------------------------------------------------------------------------------


def _has_table(part: NetworkSettings, command: TrainCommand) -> bool:
    """Whether there is a timing table of steps on a batch, or a part of one, like that of `part`."""
    return (table_folder(part, command.run.logdir) / TABLE_RECORD).is_file()


def _find_table(command: TrainCommand, steps: TracedSteps, left: float) -> tuple[TrainCommand, TimingTable | None]:
    """The timing table; a short one is measured if there is none that can be relied on, `left` seconds before the end.

    Where that leaves no time, the run takes no steps, and there is no table.

    Raises:
        UserError: there is no time, and the number of epochs was given; or rho is too small.
    """
    network, run, settings, model = command.part, command.run, command.training, steps.model
    folder, remake = table_folder(network, run.logdir), profiler_command(network, command.data, run.logdir)
    start = time.perf_counter()
    shapes = [tuple(variable.shape) for variable in model.trainable_variables]
    graph = graph_digest(ImageClassification(model), network.batch_size)
    tracing, share = time.perf_counter() - start, TABLE_SHARE * (settings.deadline or math.inf)
    until = start + min(share, left)

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
            if table is None:
                others = ", ".join(other_tables(network, run.logdir))
                found = f"no timing table in {folder}" + (f" (there is one for {others})" if others else "")
            else:
                found = f"an unreliable timing table ({table.doubt}) in {folder}"
            print(f"{found}: measuring a short one; a longer one: {remake}")
            _measure_table(command, steps, folder, until)
            used = "the next run measures again"
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
        print(table.warning(used))
    table = table.in_parts(command.network.batch_size // network.batch_size)
    if settings.deadline is None and "rho" not in command.open:  # whether features can be cached is not known yet
        RhoBudget(table, head_mask(model), settings.rho, 1.0 if settings.feature_cache == "off" else 0.0)
    if table.memory is None and settings.memory is None:  # an earlier table cannot keep to a limit
        steps.memory.limit_mb = math.inf
    return command, table


def _measure_table(command: TrainCommand, steps: TracedSteps, folder: Path, until: float) -> None:
    """Measure a short timing table into `folder`. Raises `NoTimeToMeasureError` if that takes longer than `until`."""
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
        save_table(profile_task(training, wanted, folder, "trace", QUICK_SECONDS, quick_until=until), folder)


# --- the length of a run with a deadline ------------------------------------------------------------------------------


def _export_seconds(command: TrainCommand, model: keras.Model) -> float:
    """Seconds of a deadline to keep for the export, by a first conversion, which is refused before training."""
    entry = EXPORTERS[command.run.export] if command.run.export else None
    if command.training.deadline is None or entry is None or entry.conversion_seconds is None:
        return 0.0
    return EXPORT_CONVERSIONS * entry.conversion_seconds(model)


def _choose_length(
    command: TrainCommand,
    model: keras.Model,
    data: ImageData,
    table: TimingTable,
    elapsed: float,
    export_seconds: float,
) -> tuple[TrainCommand, TimeBudget | None]:
    """The time budget, after the number of epochs and the interval of selections where a deadline leaves them open.

    A run whose epochs are open and that has no time for steps gets no budget. `elapsed` seconds of the deadline have
    passed; `export_seconds` of it are for the export.
    """
    given, settings, deadline = command, command.training, command.training.deadline
    if "rho" in command.open:
        command = _with_feasible_rho(command, model, data, table)
        settings = command.training
    if deadline is None or "num_epochs" not in command.open:
        return command, make_budget(model, data, settings, table, elapsed, export_seconds)
    most = max(settings.num_epochs, math.ceil(ENOUGH_STEPS / data.steps_per_epoch))  # epochs that are enough
    run_time = RunTime.of(table, data, settings, export_seconds)
    left, epoch = deadline - elapsed - run_time.end, DEADLINE_RHO * data.steps_per_epoch * table.full_step_ms / 1e3
    interval = settings.interval if settings.interval < settings.num_epochs else math.inf
    epochs, interval = run_time.fitting_epochs(left, epoch, most, interval, "interval" in command.open)
    chosen = {"num_epochs": epochs, "interval": min(interval, most)}
    command = command.choose(**{name: value for name, value in chosen.items() if name in command.open})
    settings = command.training
    try:
        budget = make_budget(model, data, settings, table, elapsed, export_seconds)
    except DeadlineTooShortError:
        return _without_steps(given, "there is no time for training steps"), None
    assert isinstance(budget, DeadlineBudget)
    budget.limit_rho(DEADLINE_RHO)
    if settings.interval >= settings.num_epochs:
        budget.lengthen_to(min(most, int(settings.interval)) * data.steps_per_epoch)
    return command, budget


def _with_feasible_rho(command: TrainCommand, model: keras.Model, data: ImageData, table: TimingTable) -> TrainCommand:
    """A copy whose rho suffices for the head, if the default does not."""
    settings = command.training
    smallest = smallest_rho(table, head_mask(model), first_misses(data, settings))
    if settings.rho >= smallest:
        return command
    rho = min(math.ceil(100 * smallest) / 100, 1.0)
    print(f"--rho is {rho:g}, not {settings.rho:g}: training the head alone takes {smallest:.1%} of a full step here")
    return command.choose(rho=rho)


def _without_steps(command: TrainCommand, why: str) -> TrainCommand:
    allowed = duration_text(command.training.deadline or 0.0)
    print(f"--deadline {allowed}: {why}; only the head is fitted, in closed form")
    return command.choose(**HEAD_ALONE)
