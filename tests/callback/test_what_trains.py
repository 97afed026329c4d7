"""Which tensors train in `fit`, and the line that says so."""

import keras
import numpy as np
from conftest import make_table

from elastic_trainer import ElasticTraining

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
X, Y = np.random.default_rng(0).normal(size=(16, 6)).astype(np.float32), np.arange(16) % 3


class UnusedLast(keras.Model):
    """Its last layer has weights, and `call` does not use it."""

    def __init__(self):
        super().__init__()
        self.all = [keras.layers.Dense(size) for size in (4, 4, 3, 5)]
        self.all[-1].build((None, 3))

    def call(self, inputs):
        return self.all[2](self.all[1](self.all[0](inputs)))


def unused_last():
    model = UnusedLast()
    model(X)
    model.compile("sgd", LOSS)
    return model


def test_layers_that_the_loss_does_not_depend_on_neither_count_as_training_nor_as_the_head(capsys):
    """Only the head fits."""
    model = unused_last()
    before, scheme = model.get_weights(), "elastic_training_upper_part"
    elastic = ElasticTraining(0.45, table=make_table(model), scheme=scheme, deterministic=True)
    model.fit(X, Y, verbose=0, callbacks=[elastic])
    moved = [not np.array_equal(old, new) for old, new in zip(before, model.get_weights(), strict=True)]
    assert np.flatnonzero(moved).tolist() == [4, 5]
    text = capsys.readouterr().out
    assert "2 of 6 tensors train" in text and "the loss does not depend on 2 others" in text
