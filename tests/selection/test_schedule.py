"""The steps before which a selection is due."""

import pytest
from conftest import make_small_data

from elastic_trainer.selection.schedule import Schedule, Turns
from elastic_trainer.settings import Settings
from elastic_trainer.system.errors import UserError


def test_interval_shorter_than_a_step_is_refused_and_the_shortest_named():
    data = make_small_data()
    with pytest.raises(UserError, match=r"--interval 0.1: is less than a step; .* give at least (0\.\d+)") as caught:
        Schedule.of(Settings(), data.steps_per_epoch).selection_steps(0.1)
    smallest = float(str(caught.value).rsplit(" ", 1)[1])
    schedule = Schedule.of(Settings(num_epochs=2), data.steps_per_epoch)
    assert schedule.selection_steps(smallest)[:3] == [0, 2, 3]


def test_a_part_of_a_training_selects_where_the_whole_does():
    whole = Schedule(6, 60).selection_steps(3)
    assert Schedule(6, 36, past_steps=24).selection_steps(3) == [0, *(step - 24 for step in whole if step > 24)]


@pytest.mark.parametrize(("interval", "steps"), [(0.5, [0, 3, 6, 9]), (1 / 6, [*range(12)]), (0.4, [0, 3, 5, 8, 10])])
def test_fractional_intervals_have_several_selections_an_epoch(interval, steps):
    assert Schedule.of(Settings(num_epochs=2), 6).selection_steps(interval) == steps


def test_a_turn_that_is_added_ends_where_the_one_before_it_would_have():
    turns = Turns(Schedule(6, 60), interval=5)
    for step in (10, 60):  # the run has no step 60
        turns.add(step)
    assert turns.due == {0: 0, 30: 1, 10: 0} and [turns.steps(step) for step in turns.due] == [30, 30, 20]
    assert Turns(Schedule(6, 60), None).due == {0: 0}
