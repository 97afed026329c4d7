"""The file for inference that a board fills with the weights it trained, without a converter.

The network is converted once, with random numbers in the place of the weights that will train. Their bytes then show
where each array is in the file. The board writes the trained arrays to those places. A constant that the converter adds
to an array, as the 3 of a hard sigmoid to the bias before it, is found by the differences between its values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from elastic_trainer.networks.batch_norm import FrozenBatchNormalization
from elastic_trainer.networks.batch_norm_folding import find_pairs, folded_batch_norm
from elastic_trainer.networks.tensors import restored
from elastic_trainer.networks.tflite import convert
from elastic_trainer.system.errors import UserError

SMALLEST_SHIFTED = 4  # values of an array that is found by their differences
SHIFT_ERROR = 1e-5  # of such a difference, by rounding
# In which other orders of its axes the converter may store a kernel, by their number.
_OTHER_LAYOUTS = {2: [[1, 0]], 3: [[1, 2, 0], [2, 0, 1]], 4: [[3, 0, 1, 2]]}


class InferenceFile(NamedTuple):
    """The file, and where its arrays are."""

    content: bytes  # with random numbers as weights
    offsets: list[int]  # of the arrays, in bytes
    arrays: Any  # a traced function without inputs: the arrays in their order, as the file has them


def inference_file(model: keras.Model, trained: Sequence[keras.Variable]) -> InferenceFile:
    """The inference file of `model`. The values of the variables `trained` will change.

    Raises `UserError` if LiteRT lacks a kernel, or if the converter changes a weight, so that its place is not found.
    """
    sources = _sources(model, trained)
    with restored(trained):
        rng = np.random.default_rng(0)
        for variable in trained:
            variable.assign(rng.uniform(0.5, 1.5, tuple(variable.shape)).astype(np.float32))
        with folded_batch_norm(model, (), with_products=False):
            [content] = convert(model, False)
        places = [_place(content, source().numpy()) for source in sources]

    def arrays() -> list[tf.Tensor]:
        results = []
        for source, place in zip(sources, places, strict=True):
            value = source() + place.added if place.added else source()
            results.append(value if place.layout == sorted(place.layout) else tf.transpose(value, place.layout))
        return results

    offsets = [place.offset for place in places]
    return InferenceFile(content, offsets, tf.function(arrays, autograph=False).get_concrete_function())


class _Place(NamedTuple):
    """Where an array is in the file: in bytes, in which order of its axes, and what is added to it."""

    offset: int
    layout: list[int]
    added: float = 0.0


def _place(content: bytes, value: np.ndarray) -> _Place:
    for layout in [[*range(value.ndim)], *_OTHER_LAYOUTS.get(value.ndim, ())]:
        encoded = value.transpose(layout).astype("<f4").tobytes()
        if content.count(encoded) == 1:
            return _Place(content.index(encoded), layout)
    if value.ndim == 1 and len(value) >= SMALLEST_SHIFTED:
        numbers = np.frombuffer(content[: len(content) // 4 * 4], "<f4")  # arrays of the file start at multiples of 4
        with np.errstate(invalid="ignore", over="ignore"):
            firsts = numbers[: len(numbers) - len(value) + 1]
            near = np.abs(numbers[1 : len(firsts) + 1] - firsts - (value[1] - value[0])) < SHIFT_ERROR
            windows = np.lib.stride_tricks.sliding_window_view(numbers, len(value))[np.flatnonzero(near)]
            shifts = windows - value
            matches = np.flatnonzero(np.abs(shifts - shifts[:, :1]).max(axis=1, initial=0.0) < SHIFT_ERROR)
        if len(matches) == 1:
            [match] = matches
            return _Place(4 * int(np.flatnonzero(near)[match]), [0], float(np.float32(shifts[match].mean())))
    raise UserError("--export: the converter merges weights of this network, so a board cannot write them")


def _sources(model: keras.Model, trained: Sequence[keras.Variable]) -> list[Callable[[], tf.Tensor]]:
    """What computes the arrays of the file that change: folded kernels and biases, and variables as they are."""
    waiting = {id(variable): variable for variable in trained}
    sources: list[Callable[[], tf.Tensor]] = []
    for pair in find_pairs(model):
        sources += [compute for _, compute, needs in pair.parts if any(id(each) in waiting for each in needs)]
        for variable in pair.tensors:
            waiting.pop(id(variable), None)
    for norm in (layer for layer in model._flatten_layers() if isinstance(layer, FrozenBatchNormalization)):
        own = [each for each in (norm.gamma, norm.beta) if each is not None and waiting.pop(id(each), None) is not None]
        if own:
            sources += [partial(_factor, norm), partial(_shift, norm)]
    return sources + [partial(tf.convert_to_tensor, variable.value) for variable in waiting.values()]


def _factor(norm: FrozenBatchNormalization) -> tf.Tensor:
    """What a batch norm multiplies by, as the converter computes it."""
    factor = tf.math.rsqrt(norm.moving_variance.value + norm.epsilon)
    return norm.gamma.value * factor if norm.scale else factor


def _shift(norm: FrozenBatchNormalization) -> tf.Tensor:
    """What a batch norm adds after that."""
    shift = norm.moving_mean.value * _factor(norm)
    return norm.beta.value - shift if norm.center else -shift
