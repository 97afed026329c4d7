"""TensorBoard's events of a run that is resumed."""

import time

import pytest
from command_line import NETWORK, run_here
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

import main
from elastic_trainer.runs import trainer
from elastic_trainer.system.errors import Stopped


@pytest.mark.parametrize("hours", [-48, 48])
def test_events_come_in_order_where_the_time_of_day_jumps_in_a_run_and_before_it_is_resumed(
    hours, tmp_path, monkeypatch
):
    """As on a board without a battery, which gets its time from the network. TensorBoard reads files by their names."""
    day, now = [0.0], time.time
    monkeypatch.setattr(time, "time", lambda: now() + day[0])
    monkeypatch.setattr(trainer, "TICK_SECONDS", 0.0)
    flags = [*NETWORK, "--train_type", "full_training", "--num_epochs", 1, "--logdir", tmp_path, "--run_name", "mine"]
    train = trainer.Trainer.step

    def step(self, batch):
        day[0] += 3600 * hours * (self.history.step == 3)
        if self.history.step == 5 and not folder.joinpath("stopped").exists():
            folder.joinpath("stopped").touch()
            raise Stopped(15)
        return train(self, batch)

    folder = tmp_path / "mine"
    monkeypatch.setattr(trainer.Trainer, "step", step)
    with pytest.raises(Stopped):
        run_here(main.main, "main.py", *flags)
    run_here(main.main, "main.py", "--resume", folder)
    files = sorted(folder.glob("events.out.tfevents.*"))
    events = [[*EventFileLoader(str(path)).Load()] for path in files]
    assert len(files) == 2 and 0 < events[0][-1].step <= 5 and events[1][-1].step == 14
    walls = [event.wall_time for part in events for event in part]
    assert walls == sorted(walls) and all(part[-1].wall_time - part[0].wall_time < 300 for part in events)
