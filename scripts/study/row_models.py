"""Networks that read an image row by row: `--model_name scripts/study/row_models.py:gru` or `:vit`."""

from __future__ import annotations

import keras
from keras import layers

WIDTH, DEPTH, HEADS = 64, 4, 4


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
