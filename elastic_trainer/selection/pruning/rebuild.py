"""Builds the smaller network and its optimizer from the channels that stay."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from elastic_trainer.networks.graphs import functional_graph, is_graph
from elastic_trainer.selection.pruning.channel_groups import ChannelGroups
from elastic_trainer.system.errors import UserError, first_line


def rebuild_network(
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    channels: ChannelGroups,
    kept: np.ndarray,
    changed: dict[int, np.ndarray],
) -> tuple[keras.Model, keras.optimizers.Optimizer]:
    """Build a model and an optimizer like the given ones with the `kept` channels, bool [channels of the network].

    The given ones do not change. The new ones hold the kept slices of all variables and slots, and all counts;
    `changed` has values, by the `id` of a variable of `model`, that take the place of the variable's. Raises
    `UserError` if Keras cannot rebuild the model from its configuration.
    """
    smaller = rebuild_model(model, channels, kept)
    for new, old in zip(smaller.variables, model.variables, strict=True):
        new.assign(take_kept(changed.get(id(old), old.numpy()), old, channels, kept))
    return smaller, _rebuild_optimizer(optimizer, model, smaller, channels, kept)


def take_kept(values: np.ndarray, variable: keras.Variable, channels: ChannelGroups, kept: np.ndarray) -> np.ndarray:
    """The slice of `values`, of the shape of `variable`, that belongs to the kept channels."""
    for axis, numbers in channels.axes(variable).items():
        values = np.compress(kept[numbers], values, axis)
    return values


def rebuild_model(model: keras.Model, channels: ChannelGroups, kept: np.ndarray) -> keras.Model:
    """A model like `model` with the kept numbers of channels and new weights. Raises `UserError` if Keras cannot."""
    classes = {keras.saving.get_registered_name(type(layer)): type(layer) for layer in model._flatten_layers()}
    try:
        config = model.get_config()
        _set_widths(config, model, channels, kept)
        with keras.saving.custom_object_scope(classes):
            rebuilt = type(model).from_config(config)
    except Exception as error:  # Keras and custom layers raise many kinds
        why = first_line(error)
        raise UserError(
            f"--train_type prunetrain: Keras cannot rebuild {model.name} from its configuration: {why}"
        ) from error
    for new, old in zip(rebuilt._flatten_layers(), model._flatten_layers(), strict=True):
        new.trainable = old.trainable  # from_config sets a model's flag on each of its layers
    # Paths are not compared: Keras numbers unnamed layers inside custom layers, and counts on in the new model.
    kinds = [[(each.name, len(each.shape), each.trainable) for each in one.variables] for one in (rebuilt, model)]
    if kinds[0] != kinds[1]:
        raise UserError(f"--train_type prunetrain: Keras builds other tensors from {model.name}'s configuration")
    return rebuilt


def _set_widths(config: dict[str, Any], model: Any, channels: ChannelGroups, kept: np.ndarray) -> None:
    """Write the kept numbers of channels into the configuration of a functional or sequential model."""
    layers = {layer.name: layer for layer in functional_graph(model).operations}
    for entry in config["layers"]:
        inner = entry["config"]
        layer = layers[entry.get("name") or inner["name"]]
        if is_graph(layer):
            entry.pop("build_config", None)
            _set_widths(inner, layer, channels, kept)
        elif any(channels.axes(variable) for variable in getattr(layer, "variables", ())):
            entry.pop("build_config", None)  # it holds the old shapes; without it, the first call builds the layer
            if id(layer) in channels.kernels and not channels.kernels[id(layer)].depthwise:
                numbers = channels.axes(layer.kernel)[len(layer.kernel.shape) - 1]
                key = "units" if isinstance(layer, keras.layers.Dense) else "filters"
                inner[key] = int(kept[numbers].sum())


def _rebuild_optimizer(
    optimizer: keras.optimizers.Optimizer,
    model: keras.Model,
    smaller: keras.Model,
    channels: ChannelGroups,
    kept: np.ndarray,
) -> keras.optimizers.Optimizer:
    """An optimizer for `smaller` with the slots, step counts and learning rate of the optimizer for `model`."""
    variables = model.trainable_variables
    copy = type(optimizer).from_config(optimizer.get_config())
    copy.build(smaller.trainable_variables)
    slot_of: dict[int, keras.Variable] = {}
    for slots in vars(optimizer).values():  # optimizers name their lists of slots differently
        if isinstance(slots, list) and len(slots) == len(variables):
            slot_of |= {id(slot): variable for slot, variable in zip(slots, variables, strict=True)}
    for new, old in zip(copy.variables, optimizer.variables, strict=True):
        values = old.numpy()
        variable = slot_of.get(id(old))
        if variable is not None and values.shape == tuple(variable.shape):
            values = take_kept(values, variable, channels, kept)
        new.assign(values)
    return copy
