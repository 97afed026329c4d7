"""What a run chooses for itself: the sizes of its steps, a timing table, its images' memory, and its length.

Sizes are chosen before the table, since they decide which one it is; the table before images are read, since a rho that
is too small is then refused before minutes of reading; the number of epochs after that, by how many images there are.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import keras
import numpy as np

from elastic_trainer.cli.checks import is_for_board
from elastic_trainer.cli.commands import HEAD_ALONE, profiler_command
from elastic_trainer.cli.exporters import EXPORTERS
from elastic_trainer.datasets import images
from elastic_trainer.datasets.batches import part_rows
from elastic_trainer.datasets.image_data import ImageData
from elastic_trainer.datasets.named import count_training_images
from elastic_trainer.engine.memory import MEASURED_SHARE, MemoryBudget, Needed
from elastic_trainer.engine.task import ImageClassification
from elastic_trainer.networks.tensors import all_mask, head_mask, tensor_names
from elastic_trainer.runs.config import check_images
from elastic_trainer.runs.reader import is_run
from elastic_trainer.selection.budget import RhoBudget, TimeBudget, first_misses, smallest_rho
from elastic_trainer.selection.deadline import DEADLINE_RHO, DeadlineBudget, DeadlineTooShortError, RunTime
from elastic_trainer.selection.elastic import make_budget
from elastic_trainer.selection.named import SCHEMES, trainable_mask
from elastic_trainer.selection.plan import RunPlanner
from elastic_trainer.settings import PRESETS, RATE_BATCH, TABLE_RECORD, Settings, rate_at
from elastic_trainer.settings.flags import duration_text
from elastic_trainer.system.errors import UserError
from elastic_trainer.system.files import writing
from elastic_trainer.timing.graph_digest import graph_digest
from elastic_trainer.timing.measuring import NoTimeToMeasureError, idle_training
from elastic_trainer.timing.memory_check import TracedSteps
from elastic_trainer.timing.profiling import QUICK_SECONDS, profile_task
from elastic_trainer.timing.table import TimingTable
from elastic_trainer.timing.table_file import (
    StaleTableError,
    has_table,
    load_table,
    other_tables,
    save_table,
    table_folder,
    table_settings,
)

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

Load = Callable[[Settings, float | None], ImageData]


@dataclass(frozen=True)
class Prepared:
    """A run that can start."""

    settings: Settings  # with nothing left open
    data: ImageData
    memory: MemoryBudget
    table: TimingTable | None = None  # of an elastic scheme, as the budget
    budget: TimeBudget | None = None
    plan: Iterable[str] = ()  # lines; none without a budget, and where a deadline and the epochs are given


def resolve(
    settings: Settings,
    model: keras.Model,
    load: Load,
    start: float | None = None,
    retimed: Callable[[TimingTable, int], TimingTable] | None = None,
) -> Prepared:
    """Choose what `settings` leave open, and print a line on each choice.

    Args:
        settings: of the run, with the number of classes.
        model: its network.
        load: reads its images, for the settings as chosen so far, and how many MB of them may stay in memory
            (None: see `datasets.images.read`).
        start: when the program started, by `time.perf_counter`; a deadline counts from there. Default: now.
        retimed: makes the timing table of another device, whose memory is not known, of this one's and the batch size.

    Raises:
        UserError: the least that the scheme may train does not fit into memory, into its time budget or before its
            deadline; or the run to resume was started with other images.
    """
    start = time.perf_counter() if start is None else start
    is_elastic, is_resumed = SCHEMES[settings.train_type].is_elastic, settings.resume and is_run(settings.folder)
    chooses = {name for name in ("num_epochs", "interval") if getattr(settings, name) is None}
    chooses |= {"rho"} if is_elastic and settings.rho is None and settings.deadline is None else set()
    starts = {**vars(PRESETS[settings.preset]), "rho": PRESETS["paper"].rho}
    settings = replace(settings, **{name: starts[name] for name in chooses})
    steps = TracedSteps(model, settings, MemoryBudget(settings.memory))
    settings = _choose_sizes(settings, steps, may_split=retimed is None)
    if retimed is None or not has_table(part_of(settings)):  # its times come without its memory
        _check_memory(settings, steps, is_here=retimed is None)
    table, export_seconds = None, 0.0
    if is_elastic:
        left = (settings.deadline or math.inf) - (time.perf_counter() - start)
        settings, table = _find_table(settings, steps, left, is_resumed, chooses)
    if table is not None:
        export_seconds = _export_seconds(settings, model)
        table = table if retimed is None else retimed(table, settings.batch_size)
    data = load(settings, _images_mb(settings, steps))
    if is_resumed:
        check_images(settings.folder, data.record())
    if table is None:
        return Prepared(settings, data, steps.memory)
    is_planned = settings.deadline is None or "num_epochs" in chooses
    elapsed = time.perf_counter() - start
    settings, budget = _choose_length(settings, chooses, model, data, table, elapsed, export_seconds)
    plan: Iterable[str] = ()
    if budget is not None and is_planned:
        rho = settings.rho if settings.deadline is None else DEADLINE_RHO
        planner = RunPlanner(table, head_mask(model), data, settings, steps.memory)
        plan = planner.lines(rho) if settings.plan else [planner.line(rho)]
    return Prepared(settings, data, steps.memory, table, budget, plan)


def part_of(settings: Settings) -> Settings:
    """With the size of a part of a batch as the batch size, as the timing table has it."""
    return replace(settings, batch_size=part_rows(settings.batch_size, settings.micro_batch))


# --- sizes that fit into memory ---------------------------------------------------------------------------------------


def _choose_sizes(settings: Settings, steps: TracedSteps, may_split: bool) -> Settings:
    """Choose the batch, its parts, and the learning rate: small where there are few images, and where memory is little.

    A step takes the batch in parts where memory is little; where that is not possible, the batch is smaller. The memory
    is to suffice for what the scheme trains; of an elastic one for half of it, or for measuring its timing table.
    """
    memory, chooses_batch, chooses_rate = steps.memory, settings.batch_size is None, settings.learning_rate is None
    if chooses_batch:
        batch_size, images_there = RATE_BATCH, count_training_images(settings)
        while batch_size > 1 and images_there is not None and batch_size * MIN_STEPS > images_there:
            batch_size //= 2
        settings = replace(settings, batch_size=batch_size)
        if batch_size < RATE_BATCH:
            print(f"--batch_size is {batch_size}: about {images_there} images are few (--batch_size sets another)")
    batch_size, needed, rows = settings.batch_size, _needed(settings, steps), None
    chooses_parts = settings.micro_batch is None
    settings = replace(settings, micro_batch=settings.micro_batch or 0)
    if not steps.certainly_fit(batch_size):
        is_here = may_split and SCHEMES[settings.train_type].can_split and not is_for_board(settings)
        if chooses_parts and is_here:
            rows = memory.fitting_size(lambda size: needed(batch_size, size), batch_size)
            if rows is not None and rows < batch_size:
                print(f"memory: steps take {batch_size} images in parts of {rows} (--micro_batch sets other parts)")
            settings = replace(settings, micro_batch=0 if rows in (None, batch_size) else rows)
        if chooses_batch and rows is None:
            parts = settings.micro_batch or batch_size
            fitting = memory.fitting_size(lambda size: needed(size, parts), batch_size) or 1
            if fitting < batch_size:
                print(f"--batch_size is {fitting}: {batch_size} images do not fit into memory")
            settings = replace(settings, batch_size=fitting)
    if not chooses_rate:
        return settings
    settings = replace(settings, learning_rate=rate_at(settings.batch_size))
    if settings.batch_size < RATE_BATCH and SCHEMES[settings.train_type].takes_steps:
        print(f"--learning_rate is {settings.learning_rate:g}, in proportion to the batch")
    return settings


def _check_memory(settings: Settings, steps: TracedSteps, is_here: bool) -> None:
    """Raise `UserError` if the least that the scheme may train does not fit, or measuring its timing table.

    An elastic run that trains here stays within what memory there is, unless a limit was given or it certainly fits.
    """
    scheme, memory, batch_size = SCHEMES[settings.train_type], steps.memory, settings.batch_size
    is_measured = has_table(part_of(settings))
    if scheme.is_elastic and is_here and not memory.has_limit and not steps.certainly_fit(batch_size):
        memory.limit_mb = memory.total_mb
        print(
            f"memory: selections stay within the {memory.limit_mb:,.0f} MB that there are (--memory sets another limit)"
        )
    is_fixed = not scheme.is_elastic and scheme.takes_steps
    trains_less = "--train_type elastic_training_upper_part" if is_fixed and is_measured else None
    what = "measuring the timing table of" if scheme.is_elastic and not is_measured else "training"
    needed, micro_batch = _needed(settings, steps, is_least=True), settings.micro_batch
    steps.check(needed, batch_size, micro_batch, what, scheme.can_split, trains_less)


def _images_mb(settings: Settings, steps: TracedSteps) -> float | None:
    """What a given limit leaves for images; None if none is given."""
    if settings.memory is None:
        return None
    batch_size = settings.batch_size
    beside_mb = steps.memory.room_mb - _needed(settings, steps)(batch_size, settings.micro_batch or batch_size)
    return min(max(beside_mb, 0.0), images.room_mb())


def _needed(settings: Settings, steps: TracedSteps, is_least: bool = False) -> Needed:
    """MB that training takes by the sizes of a batch and of its parts, and measuring its timing table if there is none.

    An elastic scheme trains half of the tensors, or `is_least` the head.
    """
    is_elastic, model = SCHEMES[settings.train_type].is_elastic, steps.model
    mask = trainable_mask(settings.train_type, model, settings.trained_layers)

    def needed(batch_size: int, micro_batch: int) -> float:
        part, trained = replace(settings, batch_size=part_rows(batch_size, micro_batch)), mask
        is_measured = not is_elastic or has_table(part)
        if is_elastic:
            trained = head_mask(model)
            if is_measured and not is_least:
                trained = trained | (np.arange(len(mask)) >= len(mask) // 2)
        training_mb = steps.needed_mb(trained, batch_size, micro_batch)
        return training_mb if is_measured else max(training_mb, steps.needed_mb(mask, part.batch_size))

    return needed


# --- the timing table -------------------------------------------------------------------------------------------------


def _find_table(
    settings: Settings, steps: TracedSteps, left: float, is_resumed: bool, chooses: Collection[str]
) -> tuple[Settings, TimingTable | None]:
    """The timing table; a short one is measured if there is none that can be relied on, `left` seconds before the end.

    Where that leaves no time, the run takes no steps, and there is no table.

    Raises:
        UserError: there is no time, and the number of epochs was given; or rho is too small.
    """
    part, model = part_of(settings), steps.model
    folder, remake = table_folder(part), profiler_command(part)
    start = time.perf_counter()
    shapes = [tuple(variable.shape) for variable in model.trainable_variables]
    graph = graph_digest(ImageClassification(model), part.batch_size)
    tracing, share = time.perf_counter() - start, TABLE_SHARE * (settings.deadline or math.inf)
    until = start + min(share, left)

    def load() -> TimingTable:
        return load_table(folder, table_settings(part), tensor_names(model), shapes, graph, remake)

    others = ", ".join(other_tables(part))
    table, found = None, f"no timing table in {folder}" + (f" (there is one for {others})" if others else "")
    if (folder / TABLE_RECORD).is_file():
        try:
            table = load()
        except StaleTableError as error:
            found = str(error)
    # A run that is resumed keeps the table that it started with, and deterministic runs agree only with one table.
    keeps_table, used = settings.deterministic or is_resumed, "this run keeps it"
    if table is None or (table.doubt is not None and not keeps_table):
        try:
            if TABLE_TRACES * tracing > until - time.perf_counter():
                raise NoTimeToMeasureError
            if table is not None:
                found = f"an unreliable timing table ({table.doubt}) in {folder}"
            print(f"{found}: measuring a short one; a longer one: {remake}")
            _measure_table(settings, steps, folder, until)
            used = "the next run measures again"
        except NoTimeToMeasureError as error:
            if table is None and "num_epochs" in chooses:
                return _without_steps(settings, NO_TIME), None
            if table is None:
                deadline = duration_text(settings.deadline or 0.0)
                raise UserError(f"--deadline {deadline}: {NO_TIME}; first run: {remake}") from error
            used = f"{NO_TIME}, so it is used"
        # The new one is loaded: its file rounds times, and a resumed run compares its table with the checkpoint's.
        table = load()
    if table.doubt is not None:
        print(table.warning(used))
    table = table.in_parts(settings.batch_size // part.batch_size)
    if settings.deadline is None and "rho" not in chooses:  # whether features can be cached is not known yet
        RhoBudget(table, head_mask(model), settings.rho, 1.0 if settings.feature_cache == "off" else 0.0)
    if table.memory is None and settings.memory is None:  # an earlier table cannot keep to a limit
        steps.memory.limit_mb = math.inf
    return settings, table


def _measure_table(settings: Settings, steps: TracedSteps, folder: Path, until: float) -> None:
    """Measure a short timing table into `folder`. Raises `NoTimeToMeasureError` if that takes longer than `until`."""
    part, memory = part_of(settings), steps.memory
    if not steps.certainly_fit(part.batch_size):
        expected_mb = MEASURING_FACTOR * steps.needed_mb(all_mask(steps.model), part.batch_size) + MEASURING_MB
        if not memory.fits(expected_mb):
            print(
                f"memory: measuring takes about {expected_mb:,.0f} MB for a short time, and {memory.room_mb:,.0f} MB "
                "are available; once there is a table, runs keep to the limit"
            )
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    training, wanted = idle_training(steps.model, part), table_settings(part)
    with memory.reusing(MEASURED_SHARE):
        save_table(profile_task(training, wanted, folder, "trace", QUICK_SECONDS, quick_until=until), folder)


# --- the length of a run with a deadline ------------------------------------------------------------------------------


def _export_seconds(settings: Settings, model: keras.Model) -> float:
    """Seconds of a deadline to keep for the export, by a first conversion, which is refused before training."""
    entry = EXPORTERS[settings.export] if settings.export else None
    if settings.deadline is None or entry is None or entry.conversion_seconds is None:
        return 0.0
    return EXPORT_CONVERSIONS * entry.conversion_seconds(model)


def _choose_length(
    settings: Settings,
    chooses: Collection[str],
    model: keras.Model,
    data: ImageData,
    table: TimingTable,
    elapsed: float,
    export_seconds: float,
) -> tuple[Settings, TimeBudget | None]:
    """The time budget, after what the run `chooses` of rho, the number of epochs and the interval of selections.

    A run that chooses its epochs and has no time for steps gets no budget. `elapsed` seconds of the deadline have
    passed; `export_seconds` of it are for the export.
    """
    given, deadline = settings, settings.deadline
    if "rho" in chooses:
        settings = _with_feasible_rho(settings, model, data, table)
    if deadline is None or "num_epochs" not in chooses:
        return settings, make_budget(model, data, settings, table, elapsed, export_seconds)
    most = max(settings.num_epochs, math.ceil(ENOUGH_STEPS / data.steps_per_epoch))  # epochs that are enough
    run_time = RunTime.of(table, data, settings, export_seconds)
    left, epoch = deadline - elapsed - run_time.end, DEADLINE_RHO * data.steps_per_epoch * table.full_step_ms / 1e3
    interval = settings.interval if settings.interval < settings.num_epochs else math.inf
    epochs, interval = run_time.fitting_epochs(left, epoch, most, interval, "interval" in chooses)
    chosen: dict[str, Any] = {"num_epochs": epochs, "interval": min(interval, most)}
    settings = replace(settings, **{name: value for name, value in chosen.items() if name in chooses})
    try:
        budget = make_budget(model, data, settings, table, elapsed, export_seconds)
    except DeadlineTooShortError:
        return _without_steps(given, "there is no time for training steps"), None
    assert isinstance(budget, DeadlineBudget)
    budget.limit_rho(DEADLINE_RHO)
    if settings.interval >= settings.num_epochs:
        budget.lengthen_to(min(most, int(settings.interval)) * data.steps_per_epoch)
    return settings, budget


def _with_feasible_rho(settings: Settings, model: keras.Model, data: ImageData, table: TimingTable) -> Settings:
    """A copy whose rho suffices for the head, if the default does not."""
    smallest = smallest_rho(table, head_mask(model), first_misses(data, settings))
    if settings.rho >= smallest:
        return settings
    rho = min(math.ceil(100 * smallest) / 100, 1.0)
    print(f"--rho is {rho:g}, not {settings.rho:g}: training the head alone takes {smallest:.1%} of a full step here")
    return replace(settings, rho=rho)


def _without_steps(settings: Settings, why: str) -> Settings:
    allowed = duration_text(settings.deadline or 0.0)
    print(f"--deadline {allowed}: {why}; only the head is fitted, in closed form")
    return replace(settings, **HEAD_ALONE)
