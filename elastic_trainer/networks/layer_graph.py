"""The graph of layers in a functional or sequential Keras model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras


def functional_graph(model: Any) -> Any:
    """The object that holds the nodes of a functional or sequential model."""
    return getattr(model, "_functional", None) or model


def is_graph(layer: Any) -> bool:
    """Whether `layer` is a functional or sequential Keras model. Its graph then describes all that it computes."""
    is_keras_model = isinstance(layer, keras.Model) and type(layer).__module__.partition(".")[0] == "keras"
    return is_keras_model and bool(getattr(functional_graph(layer), "_nodes_by_depth", None))


def graph_nodes(model: Any) -> list[Any]:
    """The nodes of a model's graph, its inputs left out; none if it has no graph."""
    nodes_by_depth = getattr(functional_graph(model), "_nodes_by_depth", {})
    return [node for nodes in nodes_by_depth.values() for node in nodes if not node.is_input]


def nested_nodes(model: Any) -> list[Any]:
    """The nodes of a model's graph and of the graphs of the models in it, each model once."""
    nodes = graph_nodes(model)
    inner = {id(node.operation): node.operation for node in nodes if isinstance(node.operation, keras.Model)}
    return [*nodes, *itertools.chain.from_iterable(map(nested_nodes, inner.values()))]


def walk(model: Any, inputs: Sequence[Any], visit: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """Propagate one value per tensor through a model's graph, in the order in which Keras runs the layers.

    Args:
        model: a functional or sequential model (see `is_graph`).
        inputs: one value for each input of the model.
        visit: maps a graph node and the values of its input tensors to the values of its output tensors.

    Returns:
        One value for each output of the model.
    """
    graph = functional_graph(model)
    values = {id(tensor): value for tensor, value in zip(graph.inputs, inputs, strict=True)}
    for depth in sorted(graph._nodes_by_depth, reverse=True):
        for node in graph._nodes_by_depth[depth]:
            if not node.is_input:
                results = visit(node, [values[id(tensor)] for tensor in node.input_tensors])
                values.update((id(tensor), value) for tensor, value in zip(node.outputs, results, strict=True))
    return [values[id(tensor)] for tensor in graph.outputs]
