"""The state of training restores the values that it returned."""

import keras
import numpy as np
from conftest import make_small_model
from interrupted_runs import latest
from small_networks import built_optimizer

from elastic_trainer.engine.state import TrainState
from elastic_trainer.engine.task import ImageClassification
from elastic_trainer.runs.checkpoint import Checkpoints, State


def test_bfloat16_weights_are_restored_as_bfloat16(tmp_path):
    model = make_small_model()
    keras.config.set_dtype_policy("bfloat16")
    try:
        half = make_small_model()
    finally:
        keras.config.set_dtype_policy("float32")
    state = TrainState(ImageClassification(half), built_optimizer("sgd", half), 4)
    assert half.trainable_variables[0].dtype == "bfloat16" != model.trainable_variables[0].dtype
    Checkpoints(tmp_path).save(1, State(state.values(), {}))
    before = [variable.numpy().copy() for variable in half.variables]
    for variable in half.trainable_variables:
        variable.assign(variable * 2 + 1)
    state.assign(latest(tmp_path).arrays)
    for variable, old in zip(half.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), old)
