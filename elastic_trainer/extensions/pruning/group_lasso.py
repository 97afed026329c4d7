"""The group lasso that PruneTrain adds to the loss."""

from __future__ import annotations

import functools
import operator

import keras
import numpy as np
import tensorflow as tf

from elastic_trainer.extensions.pruning.channel_groups import ChannelGroups


def group_lasso(model: keras.Model) -> tf.Tensor:
    """Sum of ‖W[..., c, :]‖ and of ‖W[..., k]‖ over the input channels c and the output channels k of all kernels.

    Fixed channels do not count (see `ChannelGroups`). A slice of zeros has gradient 0.

    Returns:
        a scalar tensor
    """
    channels = ChannelGroups(model)
    halves = []
    for kernel in channels.kernels.values():
        squares = tf.square(kernel.layer.kernel.value)
        rank = squares.shape.rank
        inverse_norms = []
        for axis, numbers in channels.axes(kernel.layer.kernel).items():
            counts = ~channels.is_fixed[numbers]
            if counts.any():
                rest = [other for other in range(rank) if other != axis]
                inverse_norm = tf.math.rsqrt(tf.reduce_sum(squares, rest, keepdims=True) + 1e-20)
                if not counts.all():
                    inverse_norm *= counts.reshape([-1] + [1] * (rank - 1 - axis)).astype(np.float32)
                inverse_norms.append(inverse_norm)
        if inverse_norms:
            # ‖w‖ has the gradient w/‖w‖. With ‖w‖ as a constant, w²/(2‖w‖) has the same gradient, but half the value.
            # It takes fewer small operations than the gradient of the square root.
            constants = tf.stop_gradient(functools.reduce(operator.add, inverse_norms))
            halves.append(0.5 * tf.reduce_sum(squares * constants))
    half = tf.add_n(halves)
    return half + tf.stop_gradient(half)
