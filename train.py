"""Trains a network under a scheme of `elastic_trainer.selection.named`; `elastic_training` is the paper's.

A scheme decides what trains (`elastic_trainer.selection.schemes.Scheme`). The one training loop is
`elastic_trainer.runs.trainer.Trainer`; `train` runs it with what a run folder needs.

Differences from the paper and its published code: the head is always trained; importance is measured on a fresh batch
each time, and everything it touches is restored; the budget rests on measured step times, not on a 2:1 rule.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import keras

from elastic_trainer.datasets.image_data import ImageData
from elastic_trainer.energy import find_energy_meter
from elastic_trainer.engine.task import ImageClassification
from elastic_trainer.evaluation.predictions import predict
from elastic_trainer.networks.saved_model import load_best
from elastic_trainer.runs.progress import ProgressBar
from elastic_trainer.runs.run_log import RunLog
from elastic_trainer.runs.stop_signals import StopSignals
from elastic_trainer.runs.trainer import Trainer
from elastic_trainer.selection.named import SCHEMES, find_scheme
from elastic_trainer.selection.schemes import Scheme, SchemeContext
from elastic_trainer.settings import BEST_MODEL, Settings
from elastic_trainer.system.errors import Stopped
from elastic_trainer.system.memory_budget import MemoryBudget
from elastic_trainer.timing.table import TimingTable


def train(
    train_type: str | Scheme,
    model: keras.Model,
    data: ImageData,
    settings: Settings,
    run: RunLog,
    table: TimingTable | None = None,
    start: float | None = None,
    memory: MemoryBudget | None = None,
    test: Callable[[], ImageData | None] = lambda: None,
) -> dict[str, Any]:
    """Train `model` under a scheme, and write its summary.json. Continues from `run`'s last checkpoint.

    Args:
        train_type: a key of `SCHEMES`, or a scheme.
        model: a classifier that returns logits.
        data, settings, memory: see `Trainer`.
        run: of the run; it has started.
        table: timing table of the network, of an elastic scheme.
        start: when the program started, by `time.perf_counter`; a deadline counts from there. Default: now.
        test: reads other images that test the best model once, after training, if there are any.

    Returns:
        What summary.json contains.

    Raises:
        UserError: the loss is no longer a finite number, or a file cannot be written.
        Stopped: by a signal; a checkpoint has been written.
    """
    task = ImageClassification(model)
    if isinstance(train_type, Scheme):
        scheme = train_type
    else:
        scheme = find_scheme(train_type).make(SchemeContext(task, data, settings, table))
    with StopSignals() as signals, ExitStack() as stack:
        meter = stack.enter_context(find_energy_meter())
        bar = ProgressBar()
        trainer = Trainer(task, data, scheme, settings, [run.events, bar, signals, run], memory=memory)
        run.restore(trainer)
        if start is not None:
            trainer.history.clocks.count_from(start)
        trainer.history.clocks.meter = meter.joules
        try:
            results = trainer.run()
        except Stopped as stopped:
            run.save()
            total = f" of {trainer.schedule.total_steps}" if trainer.deadline is None else ""
            raise Stopped(
                stopped.number,
                f"stopped after step {trainer.history.step}{total}; "
                f"continue with: {shlex.join(['python', 'main.py', '--resume', str(run.folder)])}",
            ) from None
        finally:
            bar.close()
    assert results is not None, "it ran to its end"
    results |= meter.report(results["energy_joules"])
    return run.finish({**results, **_test_results(trainer, model, run, test())})


def _test_results(trainer: Trainer, given: keras.Model, run: RunLog, images: ImageData | None) -> dict[str, Any]:
    """Loss and accuracy of the run's best model, else of its last, on the images that test it after training.

    `given` is the network that training started with; a scheme may have replaced it.
    """
    if images is None:
        return {}
    last, best = trainer.training.model, run.folder / BEST_MODEL
    is_saved = trainer.settings.save_model and best.is_file()
    model = load_best(last, best, last is not given, "--save_model") if is_saved else last
    found = predict(model, images)
    tested = {"test_images": len(found.labels), "tested": BEST_MODEL if is_saved else "the last weights"}
    return {"test_loss": float(found.losses.mean()), "test_accuracy": found.accuracy, **tested}


def elastic_training(
    model: keras.Model, data: ImageData, settings: Settings, run: RunLog, *more: Any, **named: Any
) -> dict[str, Any]:
    """Elastic training as in the paper: `train("elastic_training", …)`, whose arguments, result and errors it has.

    The method itself is `elastic_trainer.selection.elastic.ElasticScheme.select`. The published function of this name
    has other arguments:

    | published                         | here                                                                       |
    |-----------------------------------|----------------------------------------------------------------------------|
    | model                             | `model`, of `models.build`                                                 |
    | model_name                        | not needed: no rule depends on the network                                 |
    | ds_train, ds_test                 | `data`, of `data.load`                                                     |
    | run_name, logdir, disable_random_id | `run`, the folder of the run; a name that exists gets -2, -3, …          |
    | timing_info                       | `table`, as `profiler.profile` measures it                                 |
    | optim, lr, weight_decay, epochs   | `settings`: optimizer, learning_rate, weight_decay, num_epochs             |
    | interval, rho                     | `settings`: the same names; rho holds as it is, without the 2:1 rule       |
    | save_model                        | `settings.save_model`: best.keras and last.keras in the run's folder       |
    | save_txt                          | always: metrics.csv, a row an epoch, and summary.json in the run's folder  |
    """
    return train("elastic_training", model, data, settings, run, *more, **named)


def __getattr__(name: str) -> Any:
    """`train` for the scheme called `name`, such as `train.full_training`."""
    if name in SCHEMES:
        return partial(train, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
