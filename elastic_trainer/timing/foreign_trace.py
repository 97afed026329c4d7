"""A trace from another board: its operation times are given to the same network as it is built here.

A trace names its operations as the board's Keras did, `model/resnet50/conv1_conv/Conv2D`. Here the same operation is
`resnet50_classifier/resnet50/conv1_conv/convolution`. Three things agree: the layer, whether the operation belongs to
the forward pass or to the gradients, and its kind. An operation of the trace is therefore looked up by

    its exact name (for a trace of this same code)
    else, from its layer upwards: its last name and type, its last name or type, any operation of the layer

and its time is divided among the operations found, in proportion to their FLOPs. The time of those that match none is
counted and reported.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING

import numpy as np

from elastic_trainer.networks.graphs import needed_operations
from elastic_trainer.system.errors import UserError
from elastic_trainer.timing.attribution import dense_tensors
from elastic_trainer.timing.flops import count_flops
from elastic_trainer.timing.trace import OperationTrace, general_type, match_op, matched_operations, strip_layout

if TYPE_CHECKING:
    import keras

    from elastic_trainer.networks.graphs import TracedStep

MAX_UNMATCHED = 0.5  # share of the time; beyond it the trace is of another network
GRADIENTS = "gradient_tape"
_HEAD_LAYERS = re.compile(r"(dense|head|predictions|logits|classifier)(_\d+)?", re.IGNORECASE)
# Scope of the layer, forward or gradient, kind ("last name:Type", "last name", "type", or "" for any) -> operations.
_Candidates = dict[tuple[str, str, str], list[str]]


def match_operations(trace: OperationTrace, step: TracedStep, model: keras.Model) -> tuple[dict[str, float], float]:
    """Give the times of `trace` to the operations of `step`, a full training step of `model`.

    They are ms per iteration by operation of `step.graph`; with the ms that matched none of them.

    Raises:
        UserError: more than half of the time matches none: the trace is not of this network.
    """
    graph = step.graph
    flops = count_flops(graph)
    matched = matched_operations(trace, graph)
    layers = _layers(model)
    theirs = {name: _their_path(name, layers) for name in trace.op_ms if name not in matched}
    scopes = {_joined(path[:length]) for path in theirs.values() for length in range(1, len(path))}
    candidates = _candidates(step, model.name, layers, scopes)
    times: dict[str, float] = defaultdict(float)
    unmatched_ms = 0.0
    for name, time_ms in trace.op_ms.items():
        found = [matched[name]] if name in matched else _find(name, trace.types[name], theirs[name], candidates)
        if not found:
            unmatched_ms += time_ms
            continue
        weights = np.array([flops[each] for each in found])
        weights = weights / weights.sum() if weights.sum() else np.full(len(found), 1 / len(found))
        for each, weight in zip(found, weights, strict=True):
            times[each] += time_ms * float(weight)
    if unmatched_ms > MAX_UNMATCHED * trace.total_ms:
        share = unmatched_ms / trace.total_ms
        raise UserError(
            f"--from_trace: {share:.0%} of its time matches no operation of {model.name.removesuffix('_classifier')}; "
            "give the --model_name, --alpha and --input_size that it was recorded with"
        )
    return dict(times), unmatched_ms


def has_folded_batch_norm(trace: OperationTrace, step: TracedStep) -> bool:
    """Whether `trace` is of a step that folds frozen batch norm as `step` does; other programs do not."""
    known = {op.name for op in step.graph.get_operations()}
    norms = [name for name, kind in trace.types.items() if "FusedBatchNorm" in kind]
    return all(match_op(name, known) is not None for name in norms)


def _joined(path: Sequence[str]) -> str:
    """One spelling for scopes: Keras 2 allowed "/" and "-" in the names of layers, Keras 3 writes "_"."""
    return re.sub(r"[-/]", "_", "/".join(path))


def _their_path(name: str, ours: Container[str]) -> list[str]:
    """Names along the scopes of a traced operation, without `gradient_tape`, outermost model and transfer suffixes."""
    parts = strip_layout(name).removeprefix(f"{GRADIENTS}/").split("/")
    if len(parts) > 1 and re.fullmatch(r"_\d+", parts[-1]):  # copies between host and device: op/_12
        parts = parts[:-1]
    path = parts[1:] if len(parts) > 1 else parts
    if len(path) > 1:
        # The head, in or behind the backbone, is a dense layer of any name; here its name is always the same.
        at = 0 if len(path) == 2 or not _HEAD_LAYERS.fullmatch(path[1]) else 1
        if _HEAD_LAYERS.fullmatch(path[at]) and path[at] not in ours:
            path = ["head", *path[at + 1 :]]
    return path


def _layers(model: keras.Model) -> dict[str, bool]:
    """Names of all layers, also of those inside others -> whether they, or others of the name, have weights."""
    trained: dict[str, bool] = {}
    for layer in model._flatten_layers(include_self=False, recursive=True):
        name = re.sub(r"[^\w.>-]", "_", layer.name)
        trained[name] = trained.get(name, False) or bool(layer.trainable_weights)
    return trained


def _our_path(name: str, model_name: str, layers: Container[str]) -> list[str]:
    """As `_their_path`, of an operation here, without the numbers of a model that is called again."""
    parts = name.removeprefix(f"{GRADIENTS}/").split("/")
    if parts[0] == model_name or len(parts) == 1:
        return parts[1:] or parts
    firsts = [re.sub(r"_\d+$", "", part) for part in parts[1:]]
    return [first if first in layers else part for first, part in zip(firsts, parts[1:], strict=True)]


def _candidates(step: TracedStep, model_name: str, layers: dict[str, bool], scopes: set[str]) -> _Candidates:
    """Operations of `step` by every key that they may be found under; only those that loss and gradients need."""
    forward = needed_operations([step.loss])
    backward = (
        needed_operations([tensor for gradient in step.gradients for tensor in dense_tensors(gradient)]) - forward
    )
    found: _Candidates = defaultdict(list)
    for op in step.graph.get_operations():
        if op.name not in forward and op.name not in backward:
            continue
        path = _our_path(op.name, model_name, layers)
        prefixes = (_joined(path[:length]) for length in range(len(path) - 1, 0, -1))
        scope = next((prefix for prefix in prefixes if prefix in scopes), "")
        if not scope and any(layers.get(part, False) for part in path):
            continue  # layers with weights have the same name in both; pooling and the loss may not
        direction = GRADIENTS if op.name in backward else "forward"
        for kind in {f"{path[-1]}:{op.type}", _base(path[-1]), op.type.lower(), ""}:
            found[scope, direction, kind].append(op.name)
    return found


def _base(last: str) -> str:
    """An operation's last name without its number."""
    return re.sub(r"_\d+$", "", last).lower()


def _find(name: str, kind: str, path: list[str], candidates: _Candidates) -> list[str]:
    """The operations here that the operation `name` of a trace stands for; none if nothing fits."""
    last, general = path[-1], general_type(kind)
    if name != strip_layout(name):  # a transpose added for the operation it is named after
        keys = [_base(last)]
    elif general != kind:  # its name may be that of the last of several
        keys = [general.lower(), _base(last)]
    else:
        keys = [f"{last}:{kind}", _base(last), kind.lower()]
    scopes = [_joined(path[:length]) for length in range(len(path) - 1, 0, -1)]
    directions = [GRADIENTS] if name.startswith(f"{GRADIENTS}/") else ["forward"]
    if "/" not in name:  # sums of several gradients, `AddN`, stand outside all scopes
        directions.append(GRADIENTS)
    for scope in [*scopes, ""]:
        for direction in directions:
            # Outside all layers only the same kind matches.
            for key in [*keys, ""] if scope else keys:
                if (found := candidates.get((scope, direction, key))) is not None:
                    return found
    return []
