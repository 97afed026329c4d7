"""Runs of the small network that are interrupted and resumed."""

from unittest import mock

from conftest import make_small_data, make_small_model, make_table

import train
from elastic_trainer.networks.tensors import tensor_names
from elastic_trainer.runs import trainer
from elastic_trainer.runs.checkpoint import Checkpoints, State
from elastic_trainer.runs.run_log import RunLog
from elastic_trainer.settings import Settings

EPOCHS, STEPS = 3, 6  # of the runs below


class PowerCut(BaseException):
    """Simulates a power cut: nothing catches it."""


class InterruptingData:
    """The small data; raises `PowerCut` before step `at`, or in the first validation after that step."""

    def __init__(self, at, in_validation=False):
        self._data, self._at, self._in_validation, self._step = make_small_data(), at, in_validation, 0

    def __getattr__(self, name):
        return getattr(self._data, name)

    def train(self, epoch, skip=0, count=None):
        self._step = epoch * self._data.steps_per_epoch + skip
        for batch in self._data.train(epoch, skip, count):
            if self._step == self._at and not self._in_validation:
                raise PowerCut
            self._step += 1
            yield batch

    def test(self):
        if self._in_validation and self._step >= self._at:
            raise PowerCut
        return self._data.test()


def run(folder, data, elastic=False, t_dy_ms=1.0, every=1, **changes):
    """Start a run in `folder`, or resume it; returns its weights and summary. Elastic runs select twice an epoch.

    It saves a checkpoint every `every` steps.
    """
    settings = Settings(
        **{
            "learning_rate": 0.05,
            "num_epochs": EPOCHS,
            "interval": 0.5,
            "rho": 0.6,
            "deterministic": True,
            "checkpoint_minutes": 0,
            **changes,
        }
    )
    folder.mkdir(exist_ok=True)
    model = make_small_model()
    ticks = mock.patch.object(trainer, "TICK_SECONDS", 0.0)
    with RunLog(folder, {"seed": 0}, tensor_names(model)) as log, ticks:
        save = log.checkpoints.save
        log.checkpoints.save = lambda step, state: step % every or save(step, state)  # type: ignore[method-assign]
        if elastic:
            t_fw_ms = 0.0 if settings.feature_cache == "off" else 2.0
            table = make_table(model, t_dy_ms, t_fw_ms=t_fw_ms)
            summary = train.elastic_training(model, data, settings, log, table)
        else:
            summary = train.full_training(model, data, settings, log)
    return [variable.numpy() for variable in model.variables], summary


def latest(folder) -> State:
    """The newest intact checkpoint; there must be one."""
    checkpoint = Checkpoints(folder).latest()
    assert checkpoint is not None
    return checkpoint
