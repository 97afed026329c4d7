"""Channel groups: which channels are removed together."""

import numpy as np
from pruning_networks import build, built_optimizer, scheme_of, zero

from elastic_trainer.pruning.channel_groups import ChannelGroups


def test_a_channel_of_an_addition_goes_only_when_every_reader_can_do_without_it():
    model = build("resnet50")
    network = ChannelGroups(model)
    name = "conv2_block1_0_conv/kernel"  # its channels are those of all additions of the first stage
    if name not in network.prunable():
        name = next(other for other in network.prunable() if other.startswith("conv2_block1") and "3_conv" in other)
    group = network.prunable()[name]
    readers = list(network.readers(group).values())
    writers = [kernel for kernel in network.kernels.values() if network.roots(kernel.target) == (group,)]
    assert (len(readers), len(writers), network.size(group)) == (4, 4, 256)
    scheme = scheme_of(model)
    for kernel in readers[1:]:
        zero(kernel.layer.kernel, 2, [3, 7])
    zero(readers[0].layer.kernel, 2, [3])
    smaller, _ = scheme.reconfigure(model, built_optimizer(model))
    np.testing.assert_array_equal(scheme.kept[name], np.setdiff1d(np.arange(256), [3]))
    assert [kernel.layer.kernel.shape[-1] for kernel in ChannelGroups(smaller).kernels.values()].count(255) == 4
