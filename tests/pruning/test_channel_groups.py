"""Channel groups: which channels are removed together."""

import keras
import numpy as np
from pruning_networks import build, built_optimizer, scheme_of, zero

from elastic_trainer.pruning.channel_groups import ChannelGroups
from elastic_trainer.pruning.disjoint_groups import DisjointGroups


def test_channel_of_an_addition_is_removed_only_if_no_layer_reads_it():
    model = build("resnet50")
    channels = ChannelGroups(model)
    name = "conv2_block1_0_conv/kernel"  # its group holds the channels of all additions of the first stage
    if name not in channels.prunable():
        name = next(other for other in channels.prunable() if other.startswith("conv2_block1") and "3_conv" in other)
    group = channels.prunable()[name]
    readers = list(channels.readers(group).values())
    writers = [kernel for kernel in channels.kernels.values() if channels.roots(kernel.target) == (group,)]
    assert (len(readers), len(writers), channels.size(group)) == (4, 4, 256)
    scheme = scheme_of(model)
    for kernel in readers[1:]:
        zero(kernel.layer.kernel, 2, [3, 7])
    zero(readers[0].layer.kernel, 2, [3])
    smaller, _ = scheme.reconfigure(model, built_optimizer(model))
    np.testing.assert_array_equal(scheme.kept[name], np.setdiff1d(np.arange(256), [3]))
    assert [kernel.layer.kernel.shape[-1] for kernel in ChannelGroups(smaller).kernels.values()].count(255) == 4


def branched_model():
    """Two convolutions of 4 channels that are added, joined with a third one of 2 channels, flattened, and a head."""
    inputs = keras.Input((3, 3, 3))
    first = keras.layers.Conv2D(4, 1, name="first")(inputs)
    second = keras.layers.Conv2D(4, 1, name="second")(inputs)
    third = keras.layers.Conv2D(2, 1, name="third")(inputs)
    x = keras.layers.Concatenate()([keras.layers.Add()([first, second]), third])
    return keras.Model(inputs, keras.layers.Dense(5, name="head")(keras.layers.Flatten()(x)))


def test_added_outputs_share_a_group_and_the_logits_have_none_to_prune():
    channels = ChannelGroups(branched_model())
    assert {name: channels.size(group) for name, group in channels.prunable().items()} == {
        "first/kernel": 4,
        "third/kernel": 2,
    }


def test_kept_indices_of_a_flattened_concatenation_repeat_for_each_place():
    model = branched_model()
    channels = ChannelGroups(model)
    kept = {channels.prunable()["first/kernel"]: np.array([1, 3]), channels.prunable()["third/kernel"]: np.array([0])}
    groups = channels.axes(model.get_layer("head").kernel)[0]
    expected = [6 * place + index for place in range(9) for index in (1, 3, 4)]
    np.testing.assert_array_equal(channels.kept_indices(groups, kept), expected)


def test_gather_returns_one_row_for_each_place_of_the_group():
    model = branched_model()
    channels = ChannelGroups(model)
    groups = channels.axes(model.get_layer("head").kernel)[0]
    rows = channels.gather(np.arange(9 * 6), groups, channels.prunable()["third/kernel"])
    np.testing.assert_array_equal(rows, [[6 * place + 4, 6 * place + 5] for place in range(9)])


def test_joined_groups_of_equal_sizes_have_one_root_and_stay_free():
    groups = DisjointGroups()
    some, others = groups.new(4) + groups.new(2), groups.new(4) + groups.new(2)
    groups.join(some, others)
    assert groups.roots(some) == groups.roots(others)
    assert not any(map(groups.is_fixed, some + others))


def test_joined_groups_of_different_sizes_stay_apart_and_become_fixed():
    groups = DisjointGroups()
    some, others = groups.new(4) + groups.new(2), groups.new(6)
    groups.join(some, others)
    assert len(set(groups.roots(some + others))) == 3
    assert all(map(groups.is_fixed, some + others))


def test_group_joined_with_a_fixed_one_becomes_fixed():
    groups = DisjointGroups()
    free, fixed = groups.new(4), groups.new(4)
    groups.fix(fixed)
    groups.join(free, fixed)
    assert groups.is_fixed(free[0])
