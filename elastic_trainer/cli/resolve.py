"""What a run chooses for itself: a network, the sizes of its steps, a timing table, its images' memory, and rho.

Sizes are chosen before the table, since they decide which one it is; the table before images are read, since a rho that
is too small is then refused before minutes of reading.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import keras
import numpy as np

from elastic_trainer.cli.checks import is_for_board
from elastic_trainer.cli.commands import profiler_command
from elastic_trainer.datasets import images
from elastic_trainer.datasets.decoding import smaller_side
from elastic_trainer.datasets.image_data import ImageData
from elastic_trainer.datasets.sources import DataSource
from elastic_trainer.engine.memory import variables_mb
from elastic_trainer.networks.candidates import SIZES, candidates, forward_ms
from elastic_trainer.networks.tensors import head_mask
from elastic_trainer.profiling.measuring import full_step_ms, idle_training
from elastic_trainer.profiling.memory_check import TracedSteps
from elastic_trainer.profiling.tables import estimated_table
from elastic_trainer.runs.reader import check_images, is_run
from elastic_trainer.selection.budget import UNASKED_RHO, RhoBudget, first_misses, smallest_rho
from elastic_trainer.selection.named import SCHEMES, trainable_mask
from elastic_trainer.selection.plan import COMPARED_RHOS, run_plan
from elastic_trainer.settings import RATE_BATCH, TABLE_RECORD, Settings, rate_at
from elastic_trainer.settings.network_names import USUAL_SIZE
from elastic_trainer.system.memory_budget import MemoryBudget, Needed, part_rows
from elastic_trainer.timing.table import TimingTable
from elastic_trainer.timing.table_file import load_table, other_setup, other_tables, table_folder

FIRST_MODEL_SHARE = 1 / 5  # of the time until the deadline
SEEN_PHOTOS = 16  # whose sizes are read
LEAST_PART = 8  # images of a batch, as a board takes them
MIN_STEPS = 8  # an epoch, where the batch size is chosen

Load = Callable[[Settings, float | None], ImageData]


@dataclass(frozen=True)
class Prepared:
    """A run that can start."""

    settings: Settings  # with nothing left open
    data: ImageData
    memory: MemoryBudget
    table: TimingTable | None = None  # of an elastic scheme
    plan: Iterable[str] = ()  # lines; none without times


def resolve(settings: Settings, model: keras.Model, training_count: int, load: Load) -> Prepared:
    """Choose what `settings` leave open, and print a line on each choice.

    Args:
        settings: of the run, with the number of classes.
        model: its network.
        training_count: about how many images there are to train on.
        load: reads its images, for the settings as chosen so far, and how many MB of them may stay in memory
            (None: see `datasets.images.read`).

    Raises:
        UserError: the least that the scheme may train does not fit into memory or into its time budget; or the run to
            resume was started with other images.
    """
    is_elastic, is_resumed = SCHEMES[settings.train_type].is_elastic, settings.resume and is_run(settings.folder)
    steps = TracedSteps(model, settings, MemoryBudget(settings.memory))
    settings = _choose_sizes(settings, training_count, steps)
    _check_memory(settings, steps)
    table = _find_table(settings, steps) if is_elastic else None
    data = load(settings, _images_mb(settings, steps))
    if is_resumed:
        check_images(settings.folder, data.record())
    if table is None:
        return Prepared(settings, data, steps.memory)
    if settings.rho is None and settings.deadline is None:
        settings = _with_feasible_rho(settings, model, data, table)
    plan: Iterable[str] = ()
    if settings.plan or not table.is_estimate:
        rho, others = settings.rho or UNASKED_RHO, COMPARED_RHOS if settings.plan else ()
        plan = run_plan(table, head_mask(model), data, settings, steps.memory, rho, others)
    RhoBudget(table, head_mask(model), settings.rho, first_misses(data, settings))  # refuses what is too small
    return Prepared(settings, data, steps.memory, table, plan)


# --- the network ------------------------------------------------------------------------------------------------------


def choose_network(
    settings: Settings, source: DataSource, build: Callable[[Settings], keras.Model], seconds: float
) -> Settings:
    """Choose the network and the size of its input, unless they are given, and print a line on them.

    It is the first candidate whose first model takes at most `FIRST_MODEL_SHARE` of the time, and whose steps fit into
    memory; without a deadline, at the usual size. Photos are not enlarged, but to the smallest size.

    Args:
        settings: of the run, with the number of classes.
        source: its images.
        build: makes a network of these settings, see `models.build`.
        seconds: that are left until the deadline; infinity without one.
    """
    if settings.model_name is not None:
        return settings
    most = min(_usual_side(source), SIZES[0] if seconds < math.inf else USUAL_SIZE)
    sizes = [settings.input_size] if settings.input_size else [*(size for size in SIZES if size <= most)] or SIZES[-1:]
    count = source.train.count + source.test.count + source.tested_later
    limit_ms = 1e3 * FIRST_MODEL_SHARE * seconds / max(count, 1)
    for option in candidates(sizes):
        least = option.sizes[-1]
        chosen = replace(settings, model_name=option.model_name, alpha=option.alpha, input_size=least)
        model = build(replace(chosen, weights="none"))
        pass_ms, alone_ms = forward_ms(model)
        steps = TracedSteps(model, chosen, MemoryBudget(settings.memory))
        areas = {size: (size / least) ** 2 for size in option.sizes}  # times and memory are in proportion to it
        fitting = [size for size in areas if areas[size] * pass_ms <= limit_ms and _parts_fit(steps, areas[size])]
        if fitting:
            break
    keras.utils.clear_session()  # the network that trains has the names that it has in a profile
    size = fitting[0] if fitting else least
    print(
        f"--model_name is {option.model_name}, --input_size {size}: {variables_mb(model.variables):.0f} MB, "
        f"{areas[size] * alone_ms:.0f} ms for a prediction here (give them to take others)"
    )
    return replace(chosen, input_size=size)


def _usual_side(source: DataSource) -> int:
    """The median of the smaller sides of some photos, in pixels."""
    every = max(source.train.count // SEEN_PHOTOS, 1)
    sides = [smaller_side(photo) for photo, _ in islice(source.train.examples(), 0, None, every)]
    return int(np.median([side for side in sides if side] or [0]))


def _parts_fit(steps: TracedSteps, area: float) -> bool:
    """Whether an elastic step fits into memory, in parts, on images of `area` times those of the traced network."""
    rows, parts = (math.ceil(area * count) for count in (RATE_BATCH, LEAST_PART))
    return steps.certainly_fit(rows) or steps.memory.fits(_needed(steps.settings, steps)(rows, parts))


def part_of(settings: Settings) -> Settings:
    """With the size of a part of a batch as the batch size, as the timing table has it."""
    return replace(settings, batch_size=part_rows(settings.batch_size, settings.micro_batch))


# --- sizes that fit into memory ---------------------------------------------------------------------------------------


def _choose_sizes(settings: Settings, training_count: int, steps: TracedSteps) -> Settings:
    """Choose the batch, its parts, and the learning rate: small where there are few images, and where memory is little.

    A step takes the batch in parts where memory is little; where that is not possible, the batch is smaller. The memory
    is to suffice for what the scheme trains; of an elastic one for half of it, or where that is too much, for the head.
    """
    memory, chooses_batch, chooses_rate = steps.memory, settings.batch_size is None, settings.learning_rate is None
    if chooses_batch:
        batch_size = RATE_BATCH
        while batch_size > 1 and batch_size * MIN_STEPS > training_count:
            batch_size //= 2
        settings = replace(settings, batch_size=batch_size)
        if batch_size < RATE_BATCH:
            print(f"--batch_size is {batch_size}: about {training_count} images are few (--batch_size sets another)")
    batch_size, needed, rows = settings.batch_size, _needed(settings, steps), None
    chooses_parts = settings.micro_batch is None
    settings = replace(settings, micro_batch=settings.micro_batch or 0)
    if not steps.certainly_fit(batch_size):
        is_here = SCHEMES[settings.train_type].can_split and not is_for_board(settings)
        if chooses_parts and is_here:
            for each in (needed, _needed(settings, steps, is_least=True)):
                rows = rows or memory.fitting_size(partial(each, batch_size), batch_size)
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


def _check_memory(settings: Settings, steps: TracedSteps) -> None:
    """Raise `UserError` if the least that the scheme may train does not fit.

    An elastic run stays within what memory there is, unless a limit was given or it certainly fits.
    """
    scheme, memory, batch_size = SCHEMES[settings.train_type], steps.memory, settings.batch_size
    if scheme.is_elastic and not memory.has_limit and not steps.certainly_fit(batch_size):
        memory.limit_mb = memory.total_mb
        print(
            f"memory: selections stay within the {memory.limit_mb:,.0f} MB that there are (--memory sets another limit)"
        )
    trains_less = None if scheme.is_elastic or not scheme.takes_steps else "--train_type elastic_training_upper_part"
    needed, micro_batch = _needed(settings, steps, is_least=True), settings.micro_batch
    steps.check(needed, batch_size, micro_batch, scheme.can_split, trains_less)


def _images_mb(settings: Settings, steps: TracedSteps) -> float | None:
    """What a given limit leaves for images; None if none is given."""
    if settings.memory is None:
        return None
    batch_size = settings.batch_size
    beside_mb = steps.memory.room_mb - _needed(settings, steps)(batch_size, settings.micro_batch or batch_size)
    return min(max(beside_mb, 0.0), images.room_mb())


def _needed(settings: Settings, steps: TracedSteps, is_least: bool = False) -> Needed:
    """MB that training takes by the sizes of a batch and of its parts; an elastic scheme trains half of the tensors, or
    `is_least` the head."""
    mask = trainable_mask(settings.train_type, steps.model, settings.trained_layers)
    if SCHEMES[settings.train_type].is_elastic:
        mask = head_mask(steps.model)
        if not is_least:
            mask = mask | (np.arange(len(mask)) >= len(mask) // 2)
    return lambda batch_size, micro_batch: steps.needed_mb(mask, batch_size, micro_batch)


# --- the timing table -------------------------------------------------------------------------------------------------


def _find_table(settings: Settings, steps: TracedSteps) -> TimingTable:
    """The timing table that profiler.py measured, else one by FLOPs and bytes.

    Raises `UserError` if rho is too small.
    """
    part, model = part_of(settings), steps.model
    folder, remake = table_folder(part), profiler_command(part)
    others = ", ".join(other_tables(part))
    table, found = None, f"no timing table in {folder}" + (f" (there is one for {others})" if others else "")
    if (folder / TABLE_RECORD).is_file():
        table = load_table(part, model, remake)
        why = other_setup(table.details)
        if why is not None:
            table, found = None, f"the timing table in {folder} was {why}"
    if table is None:
        print(f"{found}: times follow from FLOPs, and from this run's steps; to measure them first: {remake}")
        training = idle_training(model, part)
        full_ms = full_step_ms(training) if settings.plan or is_for_board(settings) else None
        table = estimated_table(training.task, training.optimizer, part.batch_size, full_ms)
    table = table.in_parts(settings.batch_size // part.batch_size)
    if settings.rho is not None:  # whether features can be cached is not known yet
        RhoBudget(table, head_mask(model), settings.rho, 1.0 if settings.feature_cache == "off" else 0.0)
    return table


def _with_feasible_rho(settings: Settings, model: keras.Model, data: ImageData, table: TimingTable) -> Settings:
    """With the usual rho, or what suffices for the head."""
    smallest = smallest_rho(table, head_mask(model), first_misses(data, settings))
    if smallest <= UNASKED_RHO:
        return replace(settings, rho=UNASKED_RHO)
    rho = min(math.ceil(100 * smallest) / 100, 1.0)
    print(f"--rho is {rho:g}, not {UNASKED_RHO:g}: training the head alone takes {smallest:.1%} of a full step here")
    return replace(settings, rho=rho)
