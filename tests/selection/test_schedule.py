"""The steps before which a selection is due."""

import pytest

from elastic_trainer.selection.schedule import Schedule
from elastic_trainer.settings import Settings
from elastic_trainer.system.errors import UserError


def test_interval_shorter_than_a_step_is_refused_and_the_shortest_named():
    schedule = Schedule.of(Settings(num_epochs=2), 6)
    with pytest.raises(UserError, match=r"--interval 0.1: is less than a step; .* give at least (0\.\d+)") as caught:
        schedule.selection_steps(0.1)
    smallest = float(str(caught.value).rsplit(" ", 1)[1])
    assert schedule.selection_steps(smallest)[:3] == [0, 2, 3]


def test_a_part_of_a_training_selects_where_the_whole_does():
    whole = Schedule(6, 60).selection_steps(3)
    assert Schedule(6, 36, past_steps=24).selection_steps(3) == [0, *(step - 24 for step in whole if step > 24)]


@pytest.mark.parametrize(
    ("interval", "steps"), [(0.5, [0, 3, 6, 9]), (1 / 6, [*range(12)]), (0.4, [0, 3, 5, 8, 10]), (None, [0])]
)
def test_fractional_intervals_have_several_selections_an_epoch(interval, steps):
    assert Schedule.of(Settings(num_epochs=2), 6).selection_steps(interval) == steps
