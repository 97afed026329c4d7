"""Networks with weights and statistics as after training, and images for them."""

import numpy as np

from elastic_trainer.engine.optimizers import make_optimizer


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


def built_optimizer(name, model, rate=1e-2, decay=0.1):
    """An optimizer of 100 steps with slots for all trainable variables of `model`."""
    optimizer = make_optimizer(name, rate, decay, 100)
    optimizer.build(model.trainable_variables)
    return optimizer


def values(variables):
    """Copies of the present values of `variables`."""
    return [v.numpy().copy() for v in variables]
