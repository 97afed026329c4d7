"""The variants of elastic training that only the study compares."""

from dataclasses import replace

import keras
import numpy as np
import pytest
from conftest import BATCH, CLASSES, make_small_model, make_table
from small_networks import built_optimizer
from study_schemes import Betti, PathGain, select_greedy, select_layers, select_published

from elastic_trainer.networks.tensors import head_mask, tensor_names
from elastic_trainer.selection.select import select_tensors
from elastic_trainer.task import ImageClassification
from elastic_trainer.training.optimizers import make_optimizer


def random_table(model, rng):
    """A table with random times."""
    t_dw_ms, t_dy_ms = rng.uniform(0.2, 2, (2, len(model.trainable_variables)))
    table = replace(make_table(model), t_dw_ms=t_dw_ms, t_dy_ms=t_dy_ms)
    return replace(table, full_step_ms=table.predict_ms(np.ones(len(t_dw_ms), bool)))


def value(selection, head):
    return selection.importance[selection.mask & ~head].sum()


@pytest.mark.parametrize("misses", [1.0, 0.3])
@pytest.mark.parametrize("select", [select_greedy, select_layers])
def test_variants_fit_the_budget_and_are_never_better_than_the_exact_selection(select, misses, small_model):
    head, rng = head_mask(small_model), np.random.default_rng(0)
    worse = 0
    for _ in range(20):
        table, importance = random_table(small_model, rng), rng.random(len(head))
        for rho in (0.3, 0.5, 0.7, 0.8):
            selection = select(table, importance, head, rho, misses=misses)
            assert selection.mask[head].all()
            assert table.predict_ms(selection.mask, misses) <= rho * table.full_step_ms + 1e-9
            best = value(select_tensors(table, importance, head, rho, misses=misses), head)
            assert value(selection, head) <= best + 0.01 * abs(best) + 1e-9
            worse += value(selection, head) < 0.999 * best
    assert worse > 0


def test_greedy_selection_cannot_be_extended(small_model):
    head, rng = head_mask(small_model), np.random.default_rng(1)
    table, importance = random_table(small_model, rng), rng.random(len(head))
    mask = select_greedy(table, importance, head, 0.6).mask
    assert head.sum() < mask.sum() < len(head)
    for position in np.flatnonzero(~mask):
        larger = mask.copy()
        larger[position] = True
        assert table.predict_ms(larger) > 0.6 * table.full_step_ms


def test_a_layer_trains_with_all_its_tensors_or_not_at_all(small_model):
    head, rng = head_mask(small_model), np.random.default_rng(2)
    layers = [name.rpartition("/")[0] for name in tensor_names(small_model)]
    seen = set()
    for _ in range(10):
        mask = select_layers(random_table(small_model, rng), rng.random(len(head)), head, 0.6).mask
        for layer in set(layers):
            assert len({bool(trains) for trains, name in zip(mask, layers, strict=True) if name == layer}) == 1
        seen.add(mask.tobytes())
    assert len(seen) > 2


def test_published_selection_follows_the_two_to_one_rule(small_model):
    head, ones = head_mask(small_model), np.ones(len(small_model.trainable_variables))
    table = make_table(small_model, constant_ms=5.0)
    assert (select_published(table, ones, head, 1 / 3).mask == head).all()
    assert select_published(table, ones, head, 1.0).mask.all()
    half = select_published(table, ones, head, 2 / 3).mask[table.positions]
    chain_ms, own_ms = np.flatnonzero(half)[-1] + 1, half.sum()
    assert chain_ms + own_ms == pytest.approx((len(ones) * 2) / 2, abs=1)


def test_betti_importance_is_of_layers_and_counts_holes(small_data):
    pytest.importorskip("ripser", reason="pip install -r requirements-study.txt")
    inside = make_small_model()
    inputs = keras.Input(inside.input_shape[1:])
    model = keras.Model(inputs, keras.layers.Dense(CLASSES)(inside(inputs)))  # layers of layers count, too
    importance = Betti(ImageClassification(model), BATCH)(
        built_optimizer("sgd", model), small_data.importance_batches(0, 4)
    )
    layers = [name.rpartition("/")[0] for name in tensor_names(model)]
    assert len(importance) == len(layers) and (importance >= 0).all()
    for layer in set(layers):
        assert len({value for value, name in zip(importance, layers, strict=True) if name == layer}) == 1


def test_gain_over_a_path_is_the_fall_of_the_loss_and_changes_nothing(small_data):
    """The same batch again and again: the gains of all tensors add up to what training on it lowers the loss by."""
    model = make_small_model()
    model.layers[-2].rate = 0  # dropout
    optimizer = make_optimizer("sgd", 1e-3, 0.0, 100_000)
    optimizer.build(model.trainable_variables)
    [batch] = small_data.importance_batches(0, 1)
    task = ImageClassification(model)
    evaluator = PathGain(task, BATCH)
    before = [variable.numpy() for variable in [*model.variables, *optimizer.variables]]
    gains = evaluator._measure(optimizer, [batch] * 30)
    for variable, old in zip([*model.variables, *optimizer.variables], before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), old)

    def loss_on(batch):
        return float(task.run(batch.inputs, batch.targets, None, training=True)[0])

    losses = [loss_on(batch)]
    for _ in range(29):
        optimizer.apply(evaluator._gradients_on(batch), model.trainable_variables)
    losses.append(loss_on(batch))
    assert gains.sum() == pytest.approx(losses[0] - losses[1], rel=0.1) and losses[1] < losses[0]
