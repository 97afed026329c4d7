"""The group lasso over channels."""

from __future__ import annotations

import functools
import operator

import keras
import numpy as np
import tensorflow as tf

from elastic_trainer.pruning.channel_groups import ChannelGroups


def group_lasso(model: keras.Model) -> tf.Tensor:
    """Sum over all kernels of the norms of their slices by input and by output channel.

    Only channels that could be removed count. A slice that is all zero has gradient 0.
    """
    network = ChannelGroups(model)
    halves = []
    for kernel in network.kernels.values():
        squares = tf.square(kernel.layer.kernel.value)
        rank = squares.shape.rank
        over_norms = []
        for axis, groups in network.axes(kernel.layer.kernel).items():
            counts = network.spread(groups, lambda group: np.full(network.size(group), not network.is_fixed(group)))
            if counts.any():
                rest = [other for other in range(rank) if other != axis]
                over_norm = tf.math.rsqrt(tf.reduce_sum(squares, rest, keepdims=True) + 1e-20)
                if not counts.all():
                    over_norm *= counts.reshape([-1] + [1] * (rank - 1 - axis)).astype(np.float32)
                over_norms.append(over_norm)
        if over_norms:
            # d‖w‖/dw = w/‖w‖: with the norms taken as constants, half of w²/‖w‖ has that gradient, in fewer small
            # operations than going back through the root takes.
            halves.append(0.5 * tf.reduce_sum(squares * tf.stop_gradient(functools.reduce(operator.add, over_norms))))
    half = tf.add_n(halves)
    return half + tf.stop_gradient(half)
