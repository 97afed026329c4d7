"""The mean of weights that a run ends with: of the variables that train, over the last quarter of its steps."""

import numpy as np
import pytest
from conftest import make_small_data, make_small_model

from elastic_trainer import Settings, Trainer
from elastic_trainer.runs.listener import Listener
from elastic_trainer.system.memory_budget import MemoryBudget

STEPS = 40
SETTINGS = Settings(learning_rate=0.05, num_epochs=1000, max_steps=STEPS, average_weights=True)
WINDOW = range(32, STEPS + 1, 4)  # in the last quarter, every fourth step from 30 on


class Weights(Listener):
    """The weights after each step."""

    def __init__(self):
        super().__init__()
        self.after = {}

    def on_train_batch_end(self, batch, logs=None):
        self.after[batch + 1] = weights_of(self.trainer)


def weights_of(trainer):
    return [variable.numpy() for variable in trainer.training.model.trainable_variables]


def trainer(scheme="full_training", settings=SETTINGS, **more):
    listener = Weights()
    return Trainer(make_small_model(), make_small_data(), scheme, settings, [listener], **more), listener


@pytest.mark.parametrize("scheme", ["full_training", "traditional_tl_training"])
def test_a_run_ends_with_the_mean_of_the_last_steps_where_weights_train_and_changes_nothing_else(scheme):
    averaged, seen = trainer(scheme)
    start = weights_of(averaged)
    averaged.run()
    mask = averaged.history.selection.mask
    for index, (first, last) in enumerate(zip(start, weights_of(averaged), strict=True)):
        if mask[index]:
            mean = np.mean([seen.after[step][index] for step in WINDOW], axis=0)
            np.testing.assert_allclose(last, mean, rtol=1e-5, atol=1e-7)
            assert not np.array_equal(last, seen.after[STEPS][index])
        else:
            np.testing.assert_array_equal(last, first)


def test_a_run_resumed_within_the_mean_ends_as_an_unbroken_one():
    unbroken, stopped, resumed = (trainer()[0] for _ in range(3))
    unbroken.run()
    stopped.run(until_step=34)
    resumed.load(stopped.state())
    resumed.run()
    for one, other in zip(weights_of(unbroken), weights_of(resumed), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_new_selection_starts_another_mean():
    found, seen = trainer()
    found.scheme.due = (0, 33)
    found.run()
    mean = np.mean([seen.after[step][-1] for step in WINDOW if step > 33], axis=0)
    np.testing.assert_allclose(weights_of(found)[-1], mean, rtol=1e-5, atol=1e-7)


def test_with_a_limit_of_memory_the_last_weights_stay():
    found, seen = trainer(memory=MemoryBudget(1e6))
    found.run()
    for one, other in zip(weights_of(found), seen.after[STEPS], strict=True):
        np.testing.assert_array_equal(one, other)
