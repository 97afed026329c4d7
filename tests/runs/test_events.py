"""TensorBoard's events of a run that is resumed."""

import time

import pytest
from command_line import NETWORK, run_here
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

import main
from elastic_trainer.runs import trainer
from elastic_trainer.system.errors import Stopped


def test_events_come_in_order_where_the_time_of_day_was_set_back_before_a_run_is_resumed(tmp_path, monkeypatch):
    """As on a board without a battery, which gets its time from the network. TensorBoard reads files by their names."""
    day, now, train = [0.0], time.time, trainer.Trainer.step
    monkeypatch.setattr(time, "time", lambda: now() + day[0])
    flags = [*NETWORK, "--train_type", "full_training", "--num_epochs", 1, "--logdir", tmp_path, "--run_name", "mine"]

    def step(self, batch):
        if self.history.step == 5 and not day[0]:
            day[0] = -48 * 3600
            raise Stopped(15)
        return train(self, batch)

    folder = tmp_path / "mine"
    monkeypatch.setattr(trainer.Trainer, "step", step)
    with pytest.raises(Stopped):
        run_here(main.main, "main.py", *flags)
    run_here(main.main, "main.py", "--resume", folder)
    files = sorted(folder.glob("events.out.tfevents.*"))
    steps = [[event.step for event in EventFileLoader(str(path)).Load()] for path in files]
    assert len(files) == 2 and max(steps[0]) <= 5 and steps[1][-1] == 14
