"""The costs of tensors in memory: against steps that were traced, and each part by itself."""

import numpy as np
import pytest

import models
from elastic_trainer.engine.optimizers import idle_optimizer
from elastic_trainer.engine.step import TrainStep
from elastic_trainer.engine.step_memory import beside_steps_mb, forward_memory, step_memory
from elastic_trainer.engine.task import ImageClassification
from elastic_trainer.networks.tensors import head_mask
from elastic_trainer.timing.attribution import attribute
from elastic_trainer.timing.measuring import CALIBRATION, HEAD, calibration_masks
from elastic_trainer.timing.memory_costs import NO_CHAIN, Kept, MemoryCosts, memory_costs

COSTS = MemoryCosts(
    forward_mb=30.0,
    always_mb=10.0,
    split_graph_mb=0.0,
    own_mb=np.array([1.0, 2.0, 4.0]),
    chain_mb=np.array([0.1, 0.2, 0.4]),
    kept=[Kept((0, 1), NO_CHAIN, 100.0), Kept((), 1, 1000.0), Kept((0,), 2, 10_000.0)],
)


@pytest.mark.parametrize(
    ("selected", "expected"),
    [
        ([0, 0, 0], 30.0),  # the forward pass takes more
        ([1, 0, 0], 10_111.1),
        ([0, 1, 0], 10 + 2 + 0.3 + 100 + 1000),
        ([1, 1, 0], 10 + 3 + 0.3 + 100 + 1000 + 10_000),
        ([0, 0, 1], 10 + 4 + 0.7 + 1000 + 10_000),
    ],
)
def test_a_selection_pays_for_its_tensors_its_chain_and_what_they_read(selected, expected):
    assert COSTS.predict(np.array(selected, bool)) == pytest.approx(expected)


def test_they_are_those_of_traced_steps_or_somewhat_more():
    """Exact for full training, whose step they are made from; gradients of others are smaller than assumed."""
    model = models.build_model("mobilenetv2", 64, 10, alpha=0.35)
    task, optimizer = ImageClassification(model), idle_optimizer(model, "sgd")
    full = TrainStep(task, optimizer, 8)
    attribution = attribute(full, model.trainable_variables)
    costs = memory_costs(full, attribution)
    beside_mb = beside_steps_mb(forward_memory(full.graph, full.loss), full.inputs)
    masks = calibration_masks(attribution.positions, attribution.kernels, head_mask(model), [HEAD, *CALIBRATION])
    more_mb = []
    for mask in [*masks[:-1:5], masks[-1]]:
        step = TrainStep(task, optimizer, 8, mask)
        whole_mb = step_memory(step.graph, step.variables).megabytes
        more_mb.append(costs.predict(mask[attribution.positions]) - beside_mb - whole_mb)
    assert more_mb[-1] == pytest.approx(0.0, abs=1e-6)
    assert min(more_mb) > -5 and max(more_mb) < 40, more_mb
