"""Rebuilding: removed channels change neither the function, nor the training, nor its state."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import zoo
from conftest import BATCH, CLASSES
from pruning_networks import (
    NETWORKS,
    Batches,
    assert_same_logits,
    assert_survivors_equal,
    build,
    kept_of,
    kill_readers,
    kill_writers,
    scheme_of,
)
from small_networks import built_optimizer

import models
from elastic_trainer.engine.step import TrainStep
from elastic_trainer.engine.task import ImageClassification
from elastic_trainer.selection.pruning.channel_groups import ChannelGroups
from elastic_trainer.selection.pruning.rebuild import take_kept
from elastic_trainer.system.errors import UserError
from elastic_trainer.timing.flops import count_flops


@pytest.mark.parametrize("name", NETWORKS)
def test_removing_unread_or_unwritten_channels_keeps_the_logits_and_the_next_step(name):
    model = build(name)
    data, optimizer = Batches(model), built_optimizer("sgd", model)
    scheme = scheme_of(model)
    killed = kill_readers(model)
    channels = ChannelGroups(model)
    smaller, carried = scheme.reconfigure(model, optimizer)

    for kernel, indices in killed.items():  # other channels may be zero on these few images
        assert not np.isin(indices, scheme.kept[kernel]).any()
    assert [v.path for v in smaller.trainable_variables] == [v.path for v in model.trainable_variables]
    assert smaller.count_params() < 0.8 * model.count_params()
    assert_same_logits(model, smaller, data.batch[0])

    if name != "resnet50":  # whose steps take long to compile
        steps = [
            TrainStep(ImageClassification(one), own, BATCH) for one, own in ((model, optimizer), (smaller, carried))
        ]
        flops, fewer = (sum(count_flops(step.graph).values()) for step in steps)
        assert fewer < 0.8 * flops
        first, other = (step(*data.batch)[0] for step in steps)
        assert first == pytest.approx(other, rel=1e-5)
    # Pretrained and deep networks have channels that are constant on these images. They are folded into these two.
    folded = () if name in ("small", "vgg16") else ("moving_mean", "bias")
    assert_survivors_equal(smaller, model, channels, kept_of(scheme, channels), skip=folded)

    if name in ("resnet50", "vgg16"):  # what an unwritten channel has in common for all images is folded
        kill_writers(smaller, depthwise=False)
        again, _ = scheme.reconfigure(smaller, carried)
        assert_same_logits(smaller, again, data.batch[0])


@pytest.mark.parametrize("function", zoo.ALL, ids=lambda function: function.__name__)
def test_custom_networks_keep_their_logits_or_are_refused(function):
    keras.utils.set_random_seed(0)
    model = models.build_model(f"{zoo.__file__}:{function.__name__}", 12, CLASSES)
    data, optimizer = Batches(model), built_optimizer("sgd", model)
    try:
        scheme = scheme_of(model)
    except UserError as error:
        assert "--train_type prunetrain" in str(error)
        assert function.__name__ not in ("branches", "nested", "shared_weights")
        return
    kill_readers(model, share=0.5)
    smaller, carried = scheme.reconfigure(model, optimizer)
    assert smaller.count_params() < model.count_params()
    assert_same_logits(model, smaller, data.batch[0])
    TrainStep(ImageClassification(smaller), carried, BATCH)(*data.batch)


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_rebuilt_optimizer_keeps_slots_step_counts_and_schedule(name):
    model = build("small")
    data, optimizer = Batches(model), built_optimizer(name, model)
    scheme = scheme_of(model)
    mask = np.ones(len(model.trainable_variables), bool)
    TrainStep(ImageClassification(model), optimizer, BATCH, mask)(*data.batch)
    mask[1] = False  # the tensors take different numbers of steps
    for _ in range(2):
        TrainStep(ImageClassification(model), optimizer, BATCH, mask)(*data.batch)
    kill_readers(model, share=0.5, seed=1)
    channels = ChannelGroups(model)
    smaller, carried = scheme.reconfigure(model, optimizer)
    kept = kept_of(scheme, channels)
    assert any(indices[-1] >= len(indices) for indices in scheme.kept.values()), "others than the first ones are kept"
    assert int(carried.iterations) == 3
    assert float(carried.learning_rate) == pytest.approx(float(optimizer.learning_rate))
    assert type(carried.get_config()["learning_rate"]) is type(optimizer.get_config()["learning_rate"])
    slots = ["momentums"] if name == "sgd" else ["_momentums", "_velocities", "_steps"]
    for attribute in slots:
        for k, (new, old) in enumerate(zip(getattr(carried, attribute), getattr(optimizer, attribute), strict=True)):
            variable, expected = model.trainable_variables[k], old.numpy()
            if expected.ndim:
                expected = take_kept(expected, variable, channels, kept)
            np.testing.assert_array_equal(new.numpy(), expected)
            assert np.abs(old.numpy()).max() > 0
    if name == "adam":
        assert [int(steps) for steps in carried._steps][:3] == [3, 1, 3]
    TrainStep(ImageClassification(model), optimizer, BATCH)(*data.batch)
    TrainStep(ImageClassification(smaller), carried, BATCH)(*data.batch)
    assert_survivors_equal(smaller, model, channels, kept)


def test_rebuild_keeps_random_state_and_frozen_layers_can_be_saved_and_does_not_change_the_model(tmp_path):
    model = build("small", dropout=0.2)
    model.get_layer("stem").trainable = False
    data, optimizer = Batches(model), built_optimizer("sgd", model)
    scheme = scheme_of(model)
    for _ in range(3):
        model(data.batch[0], training=True)  # advances the random state
    kill_readers(model)
    before = [v.numpy() for v in [*model.variables, *optimizer.variables]]
    seeds = [v.numpy() for v in model.variables if "seed" in v.path]
    assert len(seeds) == 1
    smaller, _ = scheme.reconfigure(model, optimizer)
    for variable, old in zip([*model.variables, *optimizer.variables], before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), old)
    np.testing.assert_array_equal(seeds, [v.numpy() for v in smaller.variables if "seed" in v.path])
    assert not any(v.path.startswith("stem/") for v in smaller.trainable_variables)
    assert len([v for v in smaller.non_trainable_variables if "moving" in v.path]) == 2 * 2
    assert all(type(layer) is not keras.layers.BatchNormalization for layer in smaller._flatten_layers())
    smaller.save(tmp_path / "last.keras")
    loaded = keras.models.load_model(tmp_path / "last.keras")
    assert loaded.count_params() == smaller.count_params()
    assert_same_logits(smaller, loaded, data.batch[0])


class NoConfig(keras.layers.Layer):
    """A layer that cannot be made from its configuration."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def call(self, inputs):
        return self.function(inputs)


def test_layer_without_config_is_refused_before_training():
    inputs = keras.Input((8, 8, 3))
    x = keras.layers.Conv2D(4, 3, name="second")(keras.layers.Conv2D(4, 3, name="first")(inputs))
    x = keras.layers.GlobalAveragePooling2D()(NoConfig(tf.nn.relu)(x))
    model = keras.Model(inputs, keras.layers.Dense(CLASSES)(x))
    with pytest.raises(UserError, match="--train_type prunetrain: Keras cannot rebuild"):
        scheme_of(model)
