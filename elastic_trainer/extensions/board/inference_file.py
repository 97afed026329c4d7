"""The file for inference that a board fills with the weights it trained, without a converter.

The network is converted once, with random numbers in the place of the weights that will train. Their bytes then show
where each array is in the file. The board writes the trained arrays to those places.
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

# In which other orders of its axes the converter may store a kernel, by their number.
_OTHER_LAYOUTS = {2: [[1, 0]], 4: [[3, 0, 1, 2]]}


class InferenceFile(NamedTuple):
    """The file, and where its arrays are."""

    content: bytes  # with random numbers as weights
    offsets: list[int]  # of the arrays, in bytes
    arrays: Any  # a traced function without inputs: the arrays in their order, as the file has them


def inference_file(
    model: keras.Model, trained: Sequence[keras.Variable], convert: Callable[[Callable[..., Any]], bytes]
) -> InferenceFile | None:
    """The inference file of `model`; None if the converter changes a weight, so that its place is not found.

    The values of the variables `trained` will change. `convert` makes a file of a function of one image float32
    [1, size, size, 3] that returns {"logits": …}.
    """
    sources = _sources(model, trained)

    def infer(image: tf.Tensor) -> dict[str, tf.Tensor]:
        with folded_batch_norm(model, (), with_products=False):
            return {"logits": model(image, training=False)}

    with restored(trained):
        rng = np.random.default_rng(0)
        for variable in trained:
            variable.assign(rng.uniform(0.5, 1.5, tuple(variable.shape)).astype(np.float32))
        content = convert(infer)
        values = [source().numpy() for source in sources]
    offsets, layouts = [], []
    for value in values:
        for layout in [[*range(value.ndim)], *_OTHER_LAYOUTS.get(value.ndim, ())]:
            encoded = value.transpose(layout).astype("<f4").tobytes()
            if content.count(encoded) == 1:
                offsets.append(content.index(encoded))
                layouts.append(layout)
                break
        else:
            return None

    def arrays() -> list[tf.Tensor]:
        found = zip((source() for source in sources), layouts, strict=True)
        return [value if layout == sorted(layout) else tf.transpose(value, layout) for value, layout in found]

    return InferenceFile(content, offsets, tf.function(arrays, autograph=False).get_concrete_function())


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
