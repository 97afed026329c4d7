"""The progress bar: advice on the learning rate, and errors of other listeners before it exists."""

import pytest
from small_runs import run

import train
from elastic_trainer.runs.progress import advice
from elastic_trainer.runs.run_log import RunLog
from elastic_trainer.settings import Settings
from elastic_trainer.system.errors import UserError


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([2.0] * 4 + [1.9] * 4, "it is falling: train longer, or raise --learning_rate"),
        ([2.0] * 4 + [2.5] * 4, "it is rising: lower --learning_rate"),
        ([2.0] * 8, "it does not change, so --learning_rate may be too low or too high: try ten times more, and less"),
        ([1.7, 2.4, 1.9, 2.0, 2.4, 1.7, 2.3, 2.0], "it does not change, so"),  # 5 % more, by chance
        ([2.0] * 4 + [1.5] * 4, None),
        ([2.0, 5.0, 90.0, 800.0, 9e3, 4e4, 3e5, 6e6], "it is rising: lower --learning_rate"),
        ([2.0, 3e6, 9e5, 4e5, 1e6, 3e6, 8e5, 2e6], "it has diverged: lower --learning_rate"),
        ([6e6, 3e5, 4e4, 9e3, 800.0, 90.0, 5.0, 2.0], "it is falling: train longer"),
    ],
)
def test_advice_on_the_learning_rate_says_what_the_losses_of_an_epoch_show(losses, expected):
    found = advice(losses, 1.6)
    assert found is expected is None or f"class frequencies alone give 1.60; {expected}" in found


def test_a_listener_that_fails_at_the_start_is_reported_as_it_is(tmp_path, monkeypatch):
    def full_disk(*_):
        raise UserError("metrics.csv: cannot be written: No space left on device")

    monkeypatch.setattr(RunLog, "on_train_begin", full_disk)
    with pytest.raises(UserError, match="No space left on device"):
        run(tmp_path, train.full_training, Settings(num_epochs=1))
