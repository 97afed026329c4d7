"""What steps report, in `fit` and by `Trainer`: metrics of several numbers, numbers that are not finite, tensors."""

import json

import keras
import numpy as np
import pytest
from conftest import make_table

from elastic_trainer import ArrayData, ElasticTraining, Settings, Trainer
from elastic_trainer.system.errors import UserError

X, Y = np.random.default_rng(0).normal(size=(16, 6)).astype(np.float32), np.eye(3, dtype=np.float32)[np.arange(16) % 3]
WITH_GAP = X.copy()
WITH_GAP[9] = np.nan


def network(*metrics):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4), keras.layers.Dense(4), keras.layers.Dense(3)])
    model.compile("sgd", "mse", metrics=[*metrics])
    return model


def trainer(model, x):
    data = ArrayData(train=(x, Y), test=(X, Y), batch_size=8)
    return Trainer(model, data, settings=Settings(num_epochs=1, rho=0.7), table=make_table(model))


def test_a_metric_of_several_numbers_is_trained_validated_and_kept():
    run = trainer(network(keras.metrics.F1Score()), X)
    run.run(until_step=1)
    json.dumps(run.state().record)
    run.run()
    [row] = run.history.epochs
    assert len(row["train_f1_score"]) == len(row["test_f1_score"]) == 3


def test_values_that_are_not_finite_end_a_run_but_not_fit():
    with pytest.raises(UserError, match="lower --learning_rate, or check inputs, targets and weights for values"):
        trainer(network(), WITH_GAP).run()
    model = network()
    elastic = ElasticTraining(0.7, interval=0.5, table=make_table(model), deterministic=True, verbose=0)
    history = model.fit(WITH_GAP, Y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=[elastic]).history
    assert np.isnan(history["loss"][1]) and len(elastic.history.selections) == 4
    assert np.all(elastic.history.selection.importance == 1), "nothing is known of it"


class UnusedLast(keras.Model):
    """Its last layer has weights, and `call` does not use it."""

    def __init__(self):
        super().__init__()
        self.all = [keras.layers.Dense(size) for size in (4, 4, 3, 5)]
        self.all[-1].build((None, 3))

    def call(self, inputs):
        return self.all[2](self.all[1](self.all[0](inputs)))


def test_layers_that_the_loss_does_not_depend_on_neither_count_as_training_nor_as_the_head(capsys):
    """Only the head fits."""
    model = UnusedLast()
    model(X)
    model.compile("sgd", "mse")
    before, scheme = model.get_weights(), "elastic_training_upper_part"
    elastic = ElasticTraining(0.45, table=make_table(model), scheme=scheme, deterministic=True)
    model.fit(X, Y, verbose=0, callbacks=[elastic])
    moved = [not np.array_equal(old, new) for old, new in zip(before, model.get_weights(), strict=True)]
    assert np.flatnonzero(moved).tolist() == [4, 5]
    text = capsys.readouterr().out
    assert "2 of 6 tensors train" in text and "the loss does not depend on 2 others" in text
