"""The PruneTrain scheme: lambda, refusals and its saved state."""

import keras
import numpy as np
import pytest
import zoo
from conftest import CLASSES, make_small_data
from interrupted_runs import InterruptingData, PowerCut
from pruning_networks import Batches, build, scheme_of

import models
import train
from elastic_trainer.engine.task import classification_loss
from elastic_trainer.networks.tensors import tensor_names
from elastic_trainer.runs.run_log import RunLog
from elastic_trainer.selection.pruning.scheme import PruneTrainScheme
from elastic_trainer.settings import Settings
from elastic_trainer.system.errors import UserError


def test_penalty_is_the_given_share_of_the_first_loss():
    model = build("small")
    data = Batches(model)
    scheme = scheme_of(model, 0.0, ratio=0.2)
    penalty = float(scheme.penalty(model))
    images, labels = data.batch
    loss = float(classification_loss(labels, model(images, training=False)))
    assert penalty / (penalty + loss) == pytest.approx(0.2)


@pytest.mark.parametrize("name", ["subclassed", "attention"])
def test_network_without_removable_channels_is_refused(name):
    model = models.build_model(f"{zoo.__file__}:{name}", 32, CLASSES)
    with pytest.raises(UserError, match=r"--train_type prunetrain: .* choose another --train_type"):
        scheme_of(model)


def test_resumed_prunetrain_run_continues_with_the_pruned_network(tmp_path, capsys):
    def prunetrain(folder, data):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((8, 8, 3))
        x = keras.layers.Rescaling(1 / 255)(inputs)
        for name in ("first", "second"):  # Keras numbers its default names through a process
            x = keras.layers.Conv2D(32, 3, padding="same", activation="relu", name=name)(x)
        x = keras.layers.Dropout(0.2, seed=0)(keras.layers.GlobalAveragePooling2D()(x))
        model = keras.Model(inputs, keras.layers.Dense(3, name="head")(x))
        settings = Settings(learning_rate=0.01, num_epochs=3, checkpoint_minutes=0, save_model=True)
        folder.mkdir(exist_ok=True)
        with RunLog(folder, {}, tensor_names(model)) as log:
            scheme = PruneTrainScheme(model, data, interval=1, threshold=1.0)
            train.train(scheme, model, data, settings, log)
        return [variable.numpy() for variable in keras.models.load_model(folder / "last.keras").variables]

    expected = prunetrain(tmp_path / "uninterrupted", make_small_data())
    assert expected[0].shape[-1] < 32 and "channels left" in capsys.readouterr().out
    for at, in_validation in ((8, False), (12, True)):
        with pytest.raises(PowerCut):
            prunetrain(tmp_path / "resumed", InterruptingData(at, in_validation))
    for one, other in zip(expected, prunetrain(tmp_path / "resumed", make_small_data()), strict=True):
        np.testing.assert_array_equal(one, other)
