"""The progress bar: errors of other listeners before it exists."""

import pytest
from small_runs import run

import train
from elastic_trainer.runs.run_log import RunLog
from elastic_trainer.settings import Settings
from elastic_trainer.system.errors import UserError


def test_a_listener_that_fails_at_the_start_is_reported_as_it_is(tmp_path, monkeypatch):
    def full_disk(*_):
        raise UserError("metrics.csv: cannot be written: No space left on device")

    monkeypatch.setattr(RunLog, "on_train_begin", full_disk)
    with pytest.raises(UserError, match="No space left on device"):
        run(tmp_path, train.full_training, Settings(num_epochs=1))
