"""The smaller network and its optimizer."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from elastic_trainer.networks.batch_norm import FrozenBatchNormalization
from elastic_trainer.pruning.channel_groups import ChannelGroups, Groups
from elastic_trainer.pruning.layer_graph import functional_graph, is_graph
from utils import UserError

_layers = keras.layers


def rebuild_network(
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    network: ChannelGroups,
    kept: dict[int, np.ndarray],
    changed: dict[int, np.ndarray],
) -> tuple[keras.Model, keras.optimizers.Optimizer]:
    """`model` and `optimizer` built anew with the channels of each group that are `kept`.

    Args:
        changed: values, by id of the variable and before any channel is taken out, that differ from those in `model`.
    """
    rebuilt = rebuild_model(model, network, kept)
    for new, old in zip(rebuilt.variables, model.variables, strict=True):
        new.assign(take_kept(changed.get(id(old), old.numpy()), old, network, kept))
    return rebuilt, _carried_over(optimizer, model, rebuilt, network, kept)


def is_custom(layer: Any) -> bool:
    """Whether a layer is of a class that neither Keras nor this project defines."""
    return type(layer).__module__.partition(".")[0] != "keras" and type(layer) is not FrozenBatchNormalization


def rebuild_model(model: keras.Model, network: ChannelGroups, kept: dict[int, np.ndarray]) -> keras.Model:
    """A new model like `model` but of the `kept` widths, with new weights. Raises `UserError` where Keras cannot."""
    classes = {keras.saving.get_registered_name(type(layer)): type(layer) for layer in model._flatten_layers()}
    try:
        config = model.get_config()
        _set_widths(config, model, network, kept)
        with keras.saving.custom_object_scope(classes):
            rebuilt = type(model).from_config(config)
    except Exception as error:  # Keras and users' layers raise many kinds
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"--train_type prunetrain: Keras cannot build {model.name} anew from its configuration: {lines[0]}"
        ) from error
    for new, old in zip(rebuilt._flatten_layers(), model._flatten_layers(), strict=True):
        new.trainable = old.trainable  # from_config gives a whole model's to each of its layers
    # Paths may differ inside a layer of one's own that makes layers without a name: Keras numbers these.
    if [_kind_of(variable) for variable in rebuilt.variables] != [_kind_of(variable) for variable in model.variables]:
        raise UserError(f"--train_type prunetrain: Keras builds other tensors from {model.name}'s configuration")
    return rebuilt


def _kind_of(variable: keras.Variable) -> tuple[str, int, bool]:
    return variable.name, len(variable.shape), variable.trainable


def _set_widths(config: dict[str, Any], model: Any, network: ChannelGroups, kept: dict[int, np.ndarray]) -> None:
    """Write the new numbers of channels into the configuration of a functional or sequential model."""
    layers = {layer.name: layer for layer in functional_graph(model).operations}
    if config.get("build_input_shape"):
        _set_width(config, "build_input_shape", network, network.input_groups(functional_graph(model).inputs[0]), kept)
    for entry in config["layers"]:
        inner = entry["config"]
        layer = layers[entry.get("name") or inner["name"]]
        if is_graph(layer):
            entry.pop("build_config", None)
            _set_widths(inner, layer, network, kept)
        elif isinstance(layer, _layers.InputLayer):
            _set_width(inner, "batch_shape", network, network.input_groups(layer.output), kept)
        elif any(network.axes(variable) for variable in getattr(layer, "variables", ())):
            entry.pop("build_config", None)  # would build it for the old shapes, before it is called
            if id(layer) in network.kernels and not network.kernels[id(layer)].depthwise:
                groups = network.axes(layer.kernel)[len(layer.kernel.shape) - 1]
                inner["units" if isinstance(layer, _layers.Dense) else "filters"] = len(network.places(groups, kept))


def _set_width(
    config: dict[str, Any], key: str, network: ChannelGroups, groups: Groups, kept: dict[int, np.ndarray]
) -> None:
    """Write the number of channels of an inner model's input into the last place of a shape in its configuration."""
    if any(group in kept for group in groups):
        config[key] = (*config[key][:-1], len(network.places(groups, kept)))


def take_kept(
    values: np.ndarray, variable: keras.Variable, network: ChannelGroups, kept: dict[int, np.ndarray]
) -> np.ndarray:
    """`values`, of the shape of `variable`, with the channels that are kept."""
    for axis, groups in network.axes(variable).items():
        values = np.take(values, network.places(groups, kept), axis)
    return values


def _carried_over(
    optimizer: keras.optimizers.Optimizer,
    model: keras.Model,
    rebuilt: keras.Model,
    network: ChannelGroups,
    kept: dict[int, np.ndarray],
) -> keras.optimizers.Optimizer:
    """A new optimizer for `rebuilt` with the slots, counts and rate of that for `model`."""
    variables = model.trainable_variables
    copy = type(optimizer).from_config(optimizer.get_config())
    copy.build(rebuilt.trainable_variables)
    slot_of: dict[int, keras.Variable] = {}
    for slots in vars(optimizer).values():  # whatever lists of one variable for each tensor it keeps
        if isinstance(slots, list) and len(slots) == len(variables):
            slot_of |= {id(slot): variable for slot, variable in zip(slots, variables, strict=True)}
    for new, old in zip(copy.variables, optimizer.variables, strict=True):
        values = old.numpy()
        variable = slot_of.get(id(old))
        if variable is not None and values.shape == tuple(variable.shape):
            values = take_kept(values, variable, network, kept)
        new.assign(values)
    return copy
