"""Networks with weights and statistics as after training, and images for them."""

import numpy as np


def as_if_trained(model, seed=0):
    """`model` with random batch-norm statistics, scales and biases instead of the initial 0 and 1."""
    rng = np.random.default_rng(seed)
    for variable in model.variables:
        if variable.name in ("moving_mean", "beta", "bias"):
            variable.assign(rng.normal(0, 0.1, variable.shape))
        if variable.name in ("moving_variance", "gamma"):
            variable.assign(rng.uniform(0.5, 1.5, variable.shape))
    return model


def some_images(size, count=4, seed=0):
    """Random images float32 [count, size, size, 3] in 0…255."""
    return np.random.default_rng(seed).uniform(0, 255, (count, size, size, 3)).astype(np.float32)
