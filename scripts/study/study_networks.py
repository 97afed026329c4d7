"""The study's own networks, as `--model_name scripts/study/study_networks.py:resnet` takes them.

resnet    a residual network with batch norm and basic blocks; pretrain_resnet.py makes its weights
gru, vit  read an image row by row
"""

from __future__ import annotations

import keras
from keras import layers

RESNET_WIDTHS = (32, 64, 128, 256)  # of the stages, half of ResNet-18's
WIDTH, DEPTH, HEADS = 64, 4, 4


def resnet(input_shape: tuple[int, int, int], num_classes: int) -> keras.Model:
    """ResNet-18 at half its width (He et al., CVPR 2016, table 1)."""
    inputs = keras.Input(input_shape)
    x = layers.Rescaling(1 / 127.5, offset=-1.0)(inputs)
    x = layers.ReLU()(_normalised(x, RESNET_WIDTHS[0], 7, 2))
    x = layers.MaxPooling2D(3, 2, "same")(x)
    for stage, width in enumerate(RESNET_WIDTHS):
        x = _basic_block(x, width, 2 if stage else 1)
        x = _basic_block(x, width, 1)
    return keras.Model(inputs, layers.Dense(num_classes)(layers.GlobalAveragePooling2D()(x)))


def _basic_block(x: keras.KerasTensor, width: int, stride: int) -> keras.KerasTensor:
    inner = layers.ReLU()(_normalised(x, width, 3, stride))
    shortcut = x if stride == 1 else _normalised(x, width, 1, stride)
    return layers.ReLU()(layers.Add()([_normalised(inner, width, 3, 1), shortcut]))


def _normalised(x: keras.KerasTensor, width: int, kernel_size: int, stride: int) -> keras.KerasTensor:
    x = layers.Conv2D(width, kernel_size, stride, "same", use_bias=False)(x)
    return layers.BatchNormalization(momentum=0.9)(x)  # Keras' 0.99 needs more steps than pretraining has


def _rows(input_shape: tuple[int, int, int]) -> tuple[keras.KerasTensor, keras.KerasTensor]:
    """The input, and its rows [batch, height, width * channels] in -1…1."""
    inputs = keras.Input(input_shape)
    scaled = layers.Rescaling(1 / 127.5, offset=-1.0)(inputs)
    return inputs, layers.Reshape((input_shape[0], input_shape[1] * input_shape[2]))(scaled)


def gru(input_shape: tuple[int, int, int], num_classes: int) -> keras.Model:
    """`DEPTH` gated recurrent layers over the rows."""
    inputs, x = _rows(input_shape)
    for index in range(DEPTH):
        x = layers.GRU(WIDTH, return_sequences=index < DEPTH - 1)(x)
    return keras.Model(inputs, layers.Dense(num_classes)(x))


def vit(input_shape: tuple[int, int, int], num_classes: int) -> keras.Model:
    """A vision transformer of `DEPTH` blocks whose patches are the rows (Dosovitskiy et al., arXiv 2010.11929)."""
    inputs, x = _rows(input_shape)
    x = layers.Dense(WIDTH)(x)
    x = x + layers.Embedding(input_shape[0], WIDTH)(keras.ops.arange(input_shape[0]))
    for _ in range(DEPTH):
        normalised = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(normalised, normalised)
        hidden = layers.Dense(2 * WIDTH, activation="gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(WIDTH)(hidden)
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return keras.Model(inputs, layers.Dense(num_classes)(x))
