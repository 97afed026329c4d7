"""The PruneTrain scheme: lambda, refusals and its saved state."""

import json

import keras
import numpy as np
import pytest
import zoo
from conftest import BATCH, CLASSES, make_small_data
from interrupted_runs import InterruptingData, PowerCut
from pruning_networks import (
    Batches,
    assert_same_logits,
    build,
    built_optimizer,
    kill_readers,
    scheme_of,
    two_convolutions,
)

import models
import train
from elastic_trainer.engine.state import TrainState
from elastic_trainer.engine.step import TrainStep
from elastic_trainer.engine.task import ImageClassification, classification_loss
from elastic_trainer.networks.tensors import tensor_names
from elastic_trainer.runs.run_log import RunLog
from elastic_trainer.selection.budget import Progress
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


def test_restored_scheme_has_the_saved_structure_and_prunes_alike():
    model = two_convolutions(reader_size=3, beta=0.5)
    data, optimizer = Batches(model), built_optimizer(model, rate=1e-6)
    scheme = scheme_of(model)
    state = TrainState(ImageClassification(model), optimizer, data.batch_size)
    assert scheme.select(Progress(), state).mask.sum() == len(model.trainable_variables)
    for seed in (0, 1):  # the second removal starts from a smaller network
        kill_readers(model, share=0.5, seed=seed)
        model, optimizer = scheme.reconfigure(model, optimizer)
        TrainStep(ImageClassification(model), optimizer, BATCH)(*data.batch)
    record = json.loads(json.dumps(scheme.to_record()))

    fresh = two_convolutions(reader_size=3, beta=0.5)
    other = scheme_of(fresh)
    resumed, resumed_optimizer = other.restore(record, fresh, built_optimizer(fresh, rate=1e-6))
    assert [v.shape for v in resumed.variables] == [v.shape for v in model.variables]
    assert other.to_record() == scheme.to_record()
    # The same channels of the full network: steps at this learning rate hardly change them.
    for name in ("first", "second"):
        np.testing.assert_allclose(resumed.get_layer(name).kernel, model.get_layer(name).kernel, atol=0.03)
    for variables, saved in ((resumed.variables, model.variables), (resumed_optimizer.variables, optimizer.variables)):
        for variable, old in zip(variables, saved, strict=True):
            variable.assign(old.numpy())
    assert_same_logits(model, resumed, data.batch[0])
    assert float(other.penalty(resumed)) == pytest.approx(float(scheme.penalty(model)))
    for one in (model, resumed):
        kill_readers(one, share=0.5, seed=2)
    further, again = scheme.reconfigure(model, optimizer)[0], other.reconfigure(resumed, resumed_optimizer)[0]
    assert scheme.to_record() == other.to_record()
    assert_same_logits(further, again, data.batch[0])


def test_restoring_an_unpruned_state_returns_the_given_network():
    model = build("small")
    scheme = scheme_of(model)
    optimizer = built_optimizer(model)
    assert scheme.restore(scheme.to_record(), model, optimizer) == (model, optimizer)


def test_state_of_another_network_is_refused():
    model = build("small")
    scheme = scheme_of(model)
    foreign = {**scheme.to_record(), "channels": {"stem/kernel": {"of": 9, "kept": [0]}}}
    with pytest.raises(UserError, match="9 channels at stem/kernel, this network has 4"):
        scheme.restore(foreign, model, built_optimizer(model))


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
