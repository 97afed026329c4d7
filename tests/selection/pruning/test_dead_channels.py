"""Dead channels: which channels are removed, and what replaces them."""

import math

import numpy as np
import pytest
from pruning_networks import (
    EXACT,
    SHARE,
    Batches,
    assert_same_logits,
    build,
    kill_readers,
    kill_writers,
    scheme_of,
    two_convolutions,
    zero,
)
from small_networks import built_optimizer

from elastic_trainer.selection.pruning.scheme import PruneTrainScheme


@pytest.mark.parametrize("depthwise", [True, False])
def test_unwritten_channels_are_folded_without_changing_the_logits(depthwise):
    model = build("mobilenetv2")
    data, optimizer = Batches(model), built_optimizer("sgd", model)
    scheme = scheme_of(model)
    kill_writers(model, depthwise)
    smaller, _ = scheme.reconfigure(model, optimizer)
    left, all_channels = scheme.channels()
    assert left < 0.95 * all_channels
    assert_same_logits(model, smaller, data.batch[0])
    if depthwise:  # only 1×1 convolutions with batch norm read these channels
        count = scheme.full_counts["block_3_expand/kernel"]
        assert scheme.kept["block_3_expand/kernel"].min() >= int(SHARE * count)


@pytest.mark.parametrize(
    ("reader_size", "beta", "removed"), [(1, 0.7, True), (3, 0.7, False), (3, -0.7, True), (3, 0.0, True)]
)
def test_constant_channel_is_removed_unless_padding_mixes_zeros_with_it(reader_size, beta, removed):
    model = two_convolutions(reader_size, beta)
    zero(model.get_layer("first").kernel, 3, [1, 4])
    data, optimizer = Batches(model), built_optimizer("sgd", model)
    if beta < 0:  # otherwise every channel of this network would be dead
        model.get_layer("norm").beta.assign(np.where(np.isin(np.arange(6), [1, 4]), beta, 0.5))
    result = scheme_of(model).reconfigure(model, optimizer)
    assert (result is not None) == removed
    if result:
        assert result[0].get_layer("first").filters == 4
        assert_same_logits(model, result[0], data.batch[0])


def test_group_of_dead_channels_keeps_one_channel():
    model = build("small")
    zero(model.get_layer("left").kernel, 2, slice(None))
    zero(model.get_layer("right").kernel, 2, slice(None))
    scheme = scheme_of(model)
    smaller, _ = scheme.reconfigure(model, built_optimizer("sgd", model))
    assert smaller.get_layer("stem").filters == 1
    images = Batches(model).batch[0]
    np.testing.assert_allclose(smaller(images), model(images), atol=1e-5)


def test_threshold_is_relative_to_the_median_contribution_at_the_first_removal():
    model = two_convolutions(reader_size=1, beta=0.5)
    optimizer = built_optimizer("sgd", model)
    writer, norm, reader = (model.get_layer(name) for name in ("first", "norm", "second"))
    writer.kernel.assign(np.ones(writer.kernel.shape))  # all channels are equal except for their scale
    norm.beta.assign(np.zeros(6))
    norm.gamma.assign([1.0, 1.0, 0.3, 1.0, 1.0, 1.0])
    reader.kernel.assign(np.ones(reader.kernel.shape) * [[1.0], [0.3], [2.0], [1.1], [1.0], [1.0]])

    def pruned(threshold):
        result = scheme_of(model, threshold).reconfigure(model, optimizer)
        return 6 - result[0].get_layer("first").filters if result else 0

    assert [pruned(threshold) for threshold in (0.25, 0.35, 0.65)] == [0, 1, 2]  # 0.3 · 1 and 0.3 · 2
    scheme = scheme_of(model, 0.35)
    model, optimizer = scheme.reconfigure(model, optimizer)
    model.get_layer("second").kernel.assign(model.get_layer("second").kernel * 3.0)
    assert scheme.reconfigure(model, optimizer) is None
    model.get_layer("norm").gamma.assign([0.1, 0.3, 1.0, 1.0, 1.0])  # 0.1 · 3 = 0.3, like the channel removed first
    smaller, _ = scheme.reconfigure(model, optimizer)
    assert smaller.get_layer("first").filters == 4


def test_kept_counts_are_multiples_of_eight_and_contribute_most():
    model = two_convolutions(1, 0.5, (20, 24))
    scheme = PruneTrainScheme(model, Batches(model), threshold=EXACT)  # type: ignore[arg-type]
    killed = kill_readers(model)
    scheme.reconfigure(model, built_optimizer("sgd", model))
    assert [*map(len, scheme.kept.values())] == [16, 24]
    for name, indices in killed.items():
        count, kept = scheme.full_counts[name], scheme.kept[name]
        assert len(kept) % 8 == 0 and len(kept) <= math.ceil((count - len(indices)) / 8) * 8
        assert np.isin(indices, kept).sum() <= 7


def test_network_without_dead_channels_is_not_rebuilt():
    model = two_convolutions(reader_size=1, beta=0.5)
    for name in ("first", "second"):  # no channel is zero everywhere
        model.get_layer(name).kernel.assign(np.abs(model.get_layer(name).kernel.numpy()))
    scheme = scheme_of(model)
    assert scheme.reconfigure(model, built_optimizer("sgd", model)) is None
    assert scheme.channels() == (11, 11)
