"""The state of training restores the values that it returned."""

import keras
import numpy as np
from conftest import make_small_data, make_small_model
from interrupted_runs import latest
from small_networks import as_if_trained, built_optimizer

from elastic_trainer.networks.tensors import head_mask
from elastic_trainer.runs.checkpoint import Checkpoints, State
from elastic_trainer.task import ImageClassification
from elastic_trainer.training.state import TrainState
from elastic_trainer.training.step import TrainStep


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


def test_assigned_frozen_weights_count_in_the_same_compiled_step():
    server = as_if_trained(make_small_model(seed=1), seed=1)
    results = []
    for starts_with_them in (True, False):  # a step traced with these weights, and one that was traced with others
        model = as_if_trained(make_small_model())
        if starts_with_them:
            for variable, other in zip(model.trainable_variables, server.trainable_variables, strict=True):
                variable.assign(other)
        optimizer = built_optimizer("sgd", model)
        state = TrainState(ImageClassification(model), optimizer, 4)
        state.adopt(head_mask(model), uses_features=False)
        step = state._step
        assert (
            isinstance(step, TrainStep) and step.folded_pairs and step._frozen
        )  # else nothing is made from frozen weights
        sent = {f"model/{k}": v.numpy() for k, v in enumerate(server.variables) if v.trainable}
        sent |= {f"model/{k}": v.numpy() for k, v in enumerate(model.variables) if not v.trainable}
        state.assign({**state.values(), **sent}, keeps_step=True)
        assert state._step is step
        results.append(state.train(next(make_small_data().train(0))).loss)
        state.adopt(head_mask(model), uses_features=False)
        assert state.compiled == 1
    np.testing.assert_allclose(results[0], results[1], rtol=1e-6)
