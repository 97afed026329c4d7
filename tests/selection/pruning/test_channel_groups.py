"""Channel groups: which channels are removed together."""

import keras
import numpy as np
from pruning_networks import build, scheme_of, zero
from small_networks import built_optimizer

from elastic_trainer.selection.pruning.channel_groups import ChannelGroups


def test_channel_is_removed_only_if_no_layer_reads_it():
    model = build("small")
    zero(model.get_layer("left").kernel, 2, [1, 2])
    zero(model.get_layer("head").kernel, 0, [1])  # reads the sum of left and right
    scheme = scheme_of(model)
    smaller, _ = scheme.reconfigure(model, built_optimizer("sgd", model))
    assert scheme.kept["stem/kernel"].tolist() == [0, 2, 3] and smaller.get_layer("stem").filters == 3


def branched_model():
    """Two convolutions of 4 channels that are added, joined with a third one of 2 channels, flattened, and a head."""
    inputs = keras.Input((3, 3, 3))
    first = keras.layers.Conv2D(4, 1, name="first")(inputs)
    second = keras.layers.Conv2D(4, 1, name="second")(inputs)
    third = keras.layers.Conv2D(2, 1, name="third")(inputs)
    x = keras.layers.Concatenate()([keras.layers.Add()([first, second]), third])
    return ended(inputs, x)


def ended(inputs, x):
    return keras.Model(inputs, keras.layers.Dense(5, name="head")(keras.layers.Flatten()(x)))


def test_added_outputs_share_their_channels_and_the_logits_have_none_to_prune():
    channels = ChannelGroups(branched_model())
    assert {name: len(numbers) for name, numbers in channels.prunable().items()} == {
        "first/kernel": 4,
        "third/kernel": 2,
    }
    first, second = (channels.readers()[f"{name}/kernel"].target for name in ("first", "second"))
    np.testing.assert_array_equal(first, second)


def test_channels_that_are_added_to_two_copies_of_others_are_removed_with_both():
    inputs = keras.Input((3, 3, 3))
    part = keras.layers.Conv2D(2, 1, name="part")(inputs)
    both = keras.layers.Conv2D(4, 1, name="both")(inputs)
    model = ended(inputs, keras.layers.Add()([both, keras.layers.Concatenate()([part, part])]))
    assert [len(numbers) for numbers in ChannelGroups(model).prunable().values()] == [2]
    zero(model.get_layer("head").kernel, 0, np.arange(18) * 2 + 1)
    scheme = scheme_of(model)
    smaller, _ = scheme.reconfigure(model, built_optimizer("sgd", model))
    assert [smaller.get_layer(name).filters for name in ("part", "both")] == [1, 2]
    images = np.random.default_rng(0).uniform(0, 255, (2, 3, 3, 3)).astype(np.float32)
    np.testing.assert_allclose(smaller(images), model(images), rtol=1e-4)


def test_channels_that_are_added_to_those_of_the_image_are_fixed():
    inputs = keras.Input((3, 3, 3))
    x = keras.layers.Add()([inputs, keras.layers.Conv2D(3, 1, name="fixed")(inputs)])
    channels = ChannelGroups(ended(inputs, keras.layers.Conv2D(4, 1, name="free")(x)))
    assert [*channels.prunable()] == ["free/kernel"]
