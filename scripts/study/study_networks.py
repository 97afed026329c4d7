"""EfficientNet-Lite0, as `--model_name scripts/study/study_networks.py:efficientnet_lite` takes it.

scripts/tools/convert_efficientnet_lite.py makes its weights, which are ImageNet's.
"""

from __future__ import annotations

import keras
from keras import layers

LITE_STAGES = (  # of EfficientNet-Lite0: width, blocks, kernel size, stride, times that a block widens its input
    *((16, 1, 3, 1, 1), (24, 2, 3, 2, 6), (40, 2, 5, 2, 6), (80, 3, 3, 2, 6)),
    *((112, 3, 5, 1, 6), (192, 4, 5, 2, 6), (320, 1, 3, 1, 6)),
)


def efficientnet_lite(input_shape: tuple[int, int, int], num_classes: int) -> keras.Model:
    """EfficientNet-Lite0: B0 (Tan and Le, arXiv 1905.11946, table 1) with ReLU6, without squeeze and excitation."""
    inputs = keras.Input(input_shape)
    x = layers.Rescaling(1 / 128, offset=-127 / 128)(inputs)
    x = _lite_part(x, layers.Conv2D(32, 3, 2, "same", use_bias=False))
    for width, blocks, kernel_size, stride, factor in LITE_STAGES:
        for block in range(blocks):
            x = _lite_block(x, width, kernel_size, 1 if block else stride, factor)
    x = _lite_part(x, layers.Conv2D(1280, 1, use_bias=False))
    x = layers.Dropout(0.2)(layers.GlobalAveragePooling2D()(x))
    return keras.Model(inputs, layers.Dense(num_classes)(x))


def _lite_block(x: keras.KerasTensor, width: int, kernel_size: int, stride: int, factor: int) -> keras.KerasTensor:
    before = x
    if factor > 1:
        x = _lite_part(x, layers.Conv2D(factor * before.shape[-1], 1, use_bias=False))
    x = _lite_part(x, layers.DepthwiseConv2D(kernel_size, stride, "same", use_bias=False))
    x = layers.BatchNormalization(epsilon=1e-3)(layers.Conv2D(width, 1, use_bias=False)(x))
    return layers.Add()([x, before]) if stride == 1 and before.shape[-1] == width else x


def _lite_part(x: keras.KerasTensor, convolution: layers.Layer) -> keras.KerasTensor:
    return layers.ReLU(6.0)(layers.BatchNormalization(epsilon=1e-3)(convolution(x)))
