"""The fused optimizers make the same steps as the optimizers they replace."""

import json
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from elastic_trainer.engine.optimizers import MIN_NORM, SGDW, FusedAdam, WarmupCosine, make_optimizer

RECORD = json.loads((Path(__file__).parents[1] / "data" / "sgdw_trajectory.json").read_text())
GRADIENTS = np.array(RECORD["gradients"], np.float32)


def trajectory(optimizer, start):
    """Weights [steps, …] after each of the recorded gradients, applied in a compiled step."""
    variable = keras.Variable(np.array(start, np.float32))
    optimizer.build([variable])
    step = tf.function(lambda gradient: optimizer.apply([gradient], [variable]))
    weights = []
    for gradient in GRADIENTS:
        step(tf.constant(gradient))
        weights.append(variable.numpy().copy())
    return np.array(weights)


@pytest.mark.parametrize("case", RECORD["cases"], ids=lambda case: f"lr{case['learning_rate']:g}")
def test_sgd_makes_the_steps_of_tensorflow_addons_sgdw(case):
    recorded = np.array(case["weights"], np.float32)
    optimizer = make_optimizer("sgd", case["learning_rate"], case["weight_decay"], RECORD["steps"])
    np.testing.assert_allclose(trajectory(optimizer, RECORD["start"]), recorded, rtol=2e-6, atol=1e-7)
    undecayed = make_optimizer("sgd", case["learning_rate"], 0.0, RECORD["steps"])
    drift = np.abs(trajectory(undecayed, RECORD["start"]) - recorded).max()
    assert drift > 2e-7, "the recorded steps must differ from steps without weight decay"


def test_fused_adam_is_keras_adam():
    ours = trajectory(FusedAdam(1e-2), RECORD["start"])
    theirs = trajectory(keras.optimizers.Adam(1e-2), RECORD["start"])
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("gradient", "weights", "length"),
    [
        ([3.0, 4.0], [6.0, 8.0], 0.02 * 10),  # clipped to a share of the weights' norm
        ([0.03, 0.04], [6.0, 8.0], 0.05),  # shorter: as it is
        ([3.0, 4.0], [0.0, 0.0], 0.02 * MIN_NORM),  # weights that start at 0 can train
        ([0.0, 0.0], [0.0, 0.0], 0.0),
    ],
)
def test_clipping_bounds_the_norm_of_a_gradient_but_not_of_an_unclipped_tensor(gradient, weights, length):
    clipped, unclipped = (keras.Variable(np.array(weights, np.float32)) for _ in range(2))
    optimizer = SGDW(0.1, momentum=0.9, decoupled_weight_decay=0.5, clipping=0.02, unclipped=[1])
    optimizer.build([clipped, unclipped])
    optimizer.apply([tf.constant(gradient)] * 2, [clipped, unclipped])
    norm = np.linalg.norm(gradient) or 1.0
    decayed = np.array(weights) * (1 - 0.1 * 0.5)
    expected = [decayed - 0.1 * factor * np.array(gradient) for factor in (length / norm, 1.0)]
    np.testing.assert_allclose([clipped.numpy(), unclipped.numpy()], expected, rtol=1e-5, atol=1e-9)
    velocities = [momentum.numpy() for momentum in optimizer.momentums]
    steps = [-0.1 * factor * np.array(gradient) for factor in (length / norm, 1.0)]
    np.testing.assert_allclose(velocities, steps, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(
    ("steps", "warmup", "rise"), [(100, 0.1, 10), (7, 0.3, 2), (3, 0.9, 2), (20, 0.0, 0), (1, 0.5, 0)]
)
def test_rate_rises_in_equal_parts_and_then_falls_as_in_keras(steps, warmup, rise):
    """Keras starts the rise at a given rate: here at one part of it."""
    rate = WarmupCosine(0.3, steps, warmup)
    cosine = keras.optimizers.schedules.CosineDecay
    if rise:
        reference = cosine(0.3 / rise, steps - rise, warmup_target=0.3 + 0.3 / rise, warmup_steps=rise)
        decay = cosine(0.3, steps - rise, warmup_target=0.3, warmup_steps=rise)
        expected = [float((reference if step < rise else decay)(step)) for step in range(steps + 1)]
    else:
        expected = [float(cosine(0.3, steps)(step)) for step in range(steps + 1)]
    got = [float(rate(step)) for step in range(steps + 1)]
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-8)
    assert got[0] > 0 and max(got) == pytest.approx(0.3) and got[-1] == pytest.approx(0, abs=1e-8)


@pytest.mark.parametrize("name", ["sgd", "adam", "clipped", "warm-up"])
def test_optimizers_make_the_same_steps_after_serialisation(name):
    clipping = 1e-3 if name == "clipped" else None
    optimizer = make_optimizer(
        "adam" if name == "adam" else "sgd", 1e-2, 0.1, 10, clipping, warmup=0.3 * (name == "warm-up")
    )
    copy = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    np.testing.assert_array_equal(trajectory(copy, RECORD["start"]), trajectory(optimizer, RECORD["start"]))


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_constraints_of_weights_are_obeyed(name):
    optimizer, variable = make_optimizer(name, 1.0, 0.0, 10), keras.Variable(np.full(3, 0.5, np.float32))
    variable.constraint = keras.constraints.NonNeg()
    optimizer.build([variable])
    optimizer.apply([tf.constant([1e3, 0.0, -1e3])], [variable])
    assert variable.numpy()[0] == 0 and (variable.numpy()[1:] >= 0.5).all()
