"""Networks with weights and statistics as after training, and images for them."""

import numpy as np


def unsettled(model, seed=0):
    """`model` with batch-norm statistics and weights as far from their start as training would take them."""
    rng = np.random.default_rng(seed)
    for variable in model.variables:
        if variable.name in ("moving_mean", "beta", "bias"):
            variable.assign(rng.normal(0, 0.1, variable.shape))
        if variable.name in ("moving_variance", "gamma"):
            variable.assign(rng.uniform(0.5, 1.5, variable.shape))
    return model


def some_images(size, count=4, seed=0):
    return np.random.default_rng(seed).uniform(0, 255, (count, size, size, 3)).astype(np.float32)
