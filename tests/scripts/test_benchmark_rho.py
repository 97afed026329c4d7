"""The random network of benchmark_rho.py."""

import benchmark_rho
import keras
import numpy as np

from elastic_trainer.networks.batch_norm import FrozenBatchNormalization, freeze_batch_norm


def test_standardize_gives_normalised_outputs_and_keeps_layers_frozen():
    keras.utils.set_random_seed(0)
    images = np.random.default_rng(0).uniform(-1, 1, (16, 32, 32, 3)).astype(np.float32)
    model = freeze_batch_norm(
        keras.applications.MobileNetV2(input_shape=(32, 32, 3), include_top=False, weights=None, alpha=0.35)
    )
    layers = [layer for layer in model.layers if isinstance(layer, FrozenBatchNormalization)]
    momenta = [layer.momentum for layer in layers]
    benchmark_rho.standardize(model, images)
    assert all(type(layer) is FrozenBatchNormalization for layer in layers)
    assert [layer.momentum for layer in layers] == momenta
    statistics = [variable.numpy() for variable in model.non_trainable_variables]
    outputs = keras.Model(model.input, [layer.output for layer in layers])(images, training=True)
    for output in outputs:
        np.testing.assert_allclose(np.mean(output, axis=(0, 1, 2)), 0, atol=0.02)
    # Of the first: the last ones have one pixel an image, where Keras' unbiased variance is a fifteenth larger.
    np.testing.assert_allclose(np.var(outputs[0], axis=(0, 1, 2)), 1, atol=0.02)
    for before, variable in zip(statistics, model.non_trainable_variables, strict=True):
        np.testing.assert_array_equal(before, variable.numpy())
