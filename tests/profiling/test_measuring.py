"""The selections that the fit is measured on."""

import numpy as np
import pytest

from elastic_trainer.profiling.measuring import CALIBRATION, HEAD, calibration_masks


@pytest.mark.parametrize("count", [4, 11, 28, 158])
def test_selections_of_the_fit_differ_contain_the_head_and_end_with_all(count):
    positions, head = np.arange(count)[::-1], np.arange(count) >= count - 2
    kernels = np.full(count, -1)
    kernels[2:-1:2] = np.arange(3, count, 2)  # of gammas, each before its kernel
    masks = calibration_masks(positions, kernels, head, [HEAD, *CALIBRATION])
    assert len({mask.tobytes() for mask in masks}) == len(masks)
    assert masks[-1].all() and (masks[0] == head).all()
    assert all(mask[head].all() for mask in masks)
    assert len(masks) == 15 or count < 50
    for mask in masks:
        selected = mask[positions]
        gammas = np.flatnonzero((kernels >= 0) & selected & ~head[positions])
        assert selected[kernels[gammas]].all(), "a gamma trains only with its kernel"
