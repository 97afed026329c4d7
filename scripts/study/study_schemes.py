"""Other Tensor Selectors and importances, which only the study compares. `study_variants` makes schemes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import selection_solver_DP
from elastic_trainer.datasets.batches import Batch
from elastic_trainer.networks.tensors import restored
from elastic_trainer.selection.importance import ImportanceEvaluator, _products
from elastic_trainer.selection.select import Plan, plan_of, step_budget_ms
from elastic_trainer.timing.problem import Problem
from elastic_trainer.timing.table import TimingTable

PAPERS_T_Q = 1000
MOST_POINTS = 64  # images whose activations are compared; the time of persistent homology grows with their cube


def select_greedy(
    table: TimingTable,
    importance: np.ndarray,
    head: np.ndarray,
    rho: float,
    time_resolution: int | None = None,
    misses: float = 1.0,
) -> Plan:
    """Again and again, of the tensors that still fit, the one with the most importance per added millisecond."""
    budget_ms, mask = step_budget_ms(table, rho, misses), head.copy()
    now_ms = table.predict_ms(mask, misses)
    while True:
        best_ratio, best, best_ms = 0.0, -1, now_ms
        for position in np.flatnonzero(~mask & (importance > 0)).tolist():
            mask[position] = True
            with_it_ms = table.predict_ms(mask, misses)
            mask[position] = False
            ratio = importance[position] / max(with_it_ms - now_ms, 1e-9)
            if with_it_ms <= budget_ms and ratio > best_ratio:
                best_ratio, best, best_ms = ratio, position, with_it_ms
        if best < 0:
            return plan_of(table, mask, importance, budget_ms, misses)
        mask[best], now_ms = True, best_ms


def select_layers(
    table: TimingTable,
    importance: np.ndarray,
    head: np.ndarray,
    rho: float,
    time_resolution: int | None = None,
    misses: float = 1.0,
) -> Plan:
    """The most important layers: all tensors of a layer train, or none."""
    budget_ms = step_budget_ms(table, rho, misses)
    problem = Problem.beside(head, table, importance, budget_ms, misses)
    layers: dict[str, int] = {}
    layer_of = np.array([layers.setdefault(name.rpartition("/")[0], len(layers)) for name in table.names])
    t_dy_ms, t_dw_ms, gains = (np.bincount(layer_of, values, len(layers)) for values in problem[:3])
    solution = selection_solver_DP.solve(t_dy_ms, t_dw_ms, gains, problem.left_ms, time_resolution)
    return plan_of(table, problem.mask(solution.mask[layer_of]), importance, budget_ms, misses)


def select_published(
    table: TimingTable,
    importance: np.ndarray,
    head: np.ndarray,
    rho: float,
    time_resolution: int | None = None,
    misses: float = 1.0,
) -> Plan:
    """The paper's problem: operation times as they are, a forward pass of half the backward pass, nothing cached."""
    budget_ms = step_budget_ms(table, rho, misses)
    share = max((rho - 1 / 3) * 3 / 2, 0.0)
    total_ms = float((table.t_dy_ms + table.t_dw_ms).sum())
    gains, problem = importance[table.positions], Problem.beside(head, table, importance, budget_ms, misses)
    solution = selection_solver_DP.solve(table.t_dy_ms, table.t_dw_ms, gains, share * total_ms, PAPERS_T_Q)
    return plan_of(table, problem.mask(solution.mask), importance, budget_ms, misses)


class Betti(ImportanceEvaluator):
    """I_k = b_1 / |a| of the layer of tensor k (AdaBet, section 3).

    The outputs |a| of a layer for some images are points; b_1 is how many one-dimensional holes their Vietoris-Rips
    complexes have over all scales. No labels and no gradients.
    """

    def _measure(self, optimizer: keras.optimizers.Optimizer, batches: Sequence[Batch]) -> np.ndarray:
        from ripser import ripser
        from scipy.spatial.distance import pdist, squareform

        images = np.concatenate([np.asarray(batch.inputs) for batch in batches])[:MOST_POINTS]
        layers = [
            layer for layer in self._model._flatten_layers(include_self=False) if not isinstance(layer, keras.Model)
        ]
        outputs, importance = _outputs_of(self._model, layers, images), dict[int, float]()
        for layer in layers:
            if layer.trainable_variables:
                points = outputs[layer].reshape(len(images), -1)
                holes = ripser(squareform(pdist(points)), maxdim=1, distance_matrix=True)["dgms"][1]
                importance |= {id(variable): len(holes) / points.shape[1] for variable in layer.trainable_variables}
        return np.array([importance[id(variable)] for variable in self._model.trainable_variables])


def _outputs_of(model: keras.Model, layers: Sequence[Any], images: np.ndarray) -> dict[Any, np.ndarray]:
    """What each of `layers`, however deeply nested, returns for `images` (the last time it is called)."""
    found = {}

    def recording(layer: Any) -> Any:
        call = layer.call

        def call_and_record(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            found[layer] = np.asarray(result, np.float32)
            return result

        return call_and_record

    for layer in layers:
        layer.call = recording(layer)
    try:
        model(images)
    finally:
        for layer in layers:
            del layer.call
    return found


class PathGain(ImportanceEvaluator):
    """I_k = -sum over steps of g_k(step + 1) * dw_k(step): what tensor k contributes to the fall of the loss.

    Full training takes one step per batch, after the warm-up, each judged on the batch of the next step; then
    everything is restored. The sum over all tensors is close to the fall of the loss, so it is a gain over an interval
    that is measured, not predicted from one step.
    """

    def _measure(self, optimizer: keras.optimizers.Optimizer, batches: Sequence[Batch]) -> np.ndarray:
        variables = self._model.trainable_variables
        importance, before = np.zeros(len(variables)), None
        with restored([*variables, *optimizer.variables]):
            optimizer.iterations.assign(getattr(optimizer._learning_rate, "warmup_steps", 0))
            for batch in batches:
                gradients = self._gradients_on(batch)
                if before is not None:
                    importance -= _products(
                        gradients, [v.value - old for v, old in zip(variables, before, strict=True)]
                    )
                before = [tf.identity(variable.value) for variable in variables]
                optimizer.apply(gradients, variables)
        return importance
