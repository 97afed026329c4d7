"""The group lasso: value and gradient."""

import numpy as np
import pytest
import tensorflow as tf
from pruning_networks import build, zero

from elastic_trainer.selection.pruning.scheme import group_lasso


def test_group_lasso_and_its_gradient_match_the_definition():
    model = build("small")
    zero(model.get_layer("left").kernel, 2, [1])  # a slice of zeros: gradient 0, not NaN
    kernels = {name: model.get_layer(name).kernel for name in ("stem", "left", "right", "head")}
    slices = {"stem": [3], "left": [2, 3], "right": [2], "head": [0]}  # image and logits have no groups
    with tf.GradientTape() as tape:
        value = group_lasso(model)
    gradients = dict(zip(kernels, tape.gradient(value, [k.value for k in kernels.values()]), strict=True))
    total = 0.0
    for name, kernel in kernels.items():
        weights, expected = kernel.numpy(), 0.0
        for axis in slices[name]:
            rest = tuple(other for other in range(weights.ndim) if other != axis)
            norms = np.sqrt((weights**2).sum(rest, keepdims=True))
            total += norms.sum()
            expected = expected + weights / np.maximum(norms, 1e-30)
        np.testing.assert_allclose(gradients[name], expected, atol=1e-5, err_msg=name)
    assert float(value) == pytest.approx(total, rel=1e-5)
