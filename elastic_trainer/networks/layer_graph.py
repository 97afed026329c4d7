"""The graph of layers in a functional or sequential Keras model."""

from __future__ import annotations

import itertools
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
