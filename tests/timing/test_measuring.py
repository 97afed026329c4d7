"""The selections that the fit is measured on."""

import numpy as np
import pytest

from elastic_trainer.timing import measuring
from elastic_trainer.timing.measuring import MEMORY_STEPS, calibration_masks


@pytest.mark.parametrize("count", [4, 11, 28, 158])
def test_selections_of_the_fit_differ_contain_the_head_and_end_with_all(count):
    positions, head = np.arange(count)[::-1], np.arange(count) >= count - 2
    kernels = np.full(count, -1)
    kernels[2:-1:2] = np.arange(3, count, 2)  # of gammas, each before its kernel
    masks = calibration_masks(positions, kernels, head)
    assert len({mask.tobytes() for mask in masks}) == len(masks)
    assert masks[-1].all() and (masks[0] == head).all()
    assert all(mask[head].all() for mask in masks)
    assert len(masks) == 15 or count < 50
    for mask in masks:
        selected = mask[positions]
        gammas = np.flatnonzero((kernels >= 0) & selected & ~head[positions])
        assert selected[kernels[gammas]].all(), "a gamma trains only with its kernel"


def test_the_memory_of_a_full_step_is_told_only_where_no_earlier_peak_hides_it(monkeypatch):
    ran = []
    for earlier_mb, before_mb, expected in ((910.0, 900.0, 300.0), (1200.0, 900.0, None), (None, None, None)):
        monkeypatch.setattr(measuring, "peak_memory_mb", lambda: 1200.0)
        assert measuring._full_mb(lambda: ran.append(1), before_mb, earlier_mb) == expected
    assert len(ran) == 3 * (MEMORY_STEPS - 1)
