"""The selections that the fit is measured on."""

import time

import numpy as np
import pytest
from conftest import make_small_model
from small_runs import SETTINGS

from elastic_trainer.timing import measuring
from elastic_trainer.timing.fit import depth_of, fit_wall_time, selection_sums
from elastic_trainer.timing.measuring import (
    CALIBRATION,
    HEAD,
    QUICK_CALIBRATION,
    QUICK_ROUNDS,
    NoTimeToMeasureError,
    calibration_masks,
    idle_training,
    measure,
)
from elastic_trainer.timing.profiling import QUICK_SECONDS, profile_task
from elastic_trainer.timing.table_file import table_settings


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


@pytest.mark.parametrize("factors", [(0.8, 0.3, 0.6), (0.4, 0.9, 0.6)])
def test_a_short_table_tells_the_error_chain_from_weight_gradients(factors):
    """Also where measured steps are off by a few per cent; so neither is taken for free."""
    count = 60
    rng = np.random.default_rng(0)
    t_dy, t_dw, t_fw = rng.uniform(0.5, 1.5, (3, count))
    head, kernels = np.arange(count) >= count - 2, np.full(count, -1)
    masks = calibration_masks(np.arange(count)[::-1], kernels, head, QUICK_CALIBRATION)
    selected = [mask[::-1] for mask in masks]
    forward = t_fw.sum()
    rows = [[*selection_sums(one, t_dy, t_dw), forward] for one in selected]
    rows += [[*selection_sums(one, t_dy, t_dw), t_fw[: depth_of(one)].sum()] for one in selected[:-1]]
    sums, ids = np.array(rows), np.array([*range(len(masks)), *range(len(masks) - 1)])
    for _ in range(20):
        measured_ms = (2.0 + sums @ factors) * rng.normal(1, 0.03, len(sums))
        fit = fit_wall_time(sums, np.zeros_like(sums), measured_ms, ids, 5)
        assert fit.t_dy_factor > 0.3 * factors[0] and fit.t_dw_factor > 0.3 * factors[1]


def test_a_short_table_that_would_not_end_in_time_is_not_measured(monkeypatch):
    training = idle_training(make_small_model(), SETTINGS)
    with pytest.raises(NoTimeToMeasureError):
        measure(training, quick_until=time.perf_counter())
    # Too little: time for 15 full steps; less time than what grows with compiling.
    for name, value in (("measure_ms", lambda *_: np.array([[40e3]])), ("FULL_COMPILING", 1e6)):
        with monkeypatch.context() as patch, pytest.raises(NoTimeToMeasureError):
            patch.setattr(measuring, name, value)
            measure(training, quick_until=time.perf_counter() + 600)
    fewest = []

    def measure_steps(runs, seconds, at_least):
        fewest.append((seconds, at_least))
        return np.ones((2, len(runs)))

    monkeypatch.setattr(measuring, "measure_steps", measure_steps)
    assert measure(training, seconds=1e4, quick_until=time.perf_counter() + 600).is_quick
    [(seconds, at_least)] = fewest
    assert 0 < seconds < 300 and at_least == QUICK_ROUNDS


def test_where_the_time_suffices_for_the_full_step_alone_the_table_says_so(monkeypatch, tmp_path):
    """It still predicts shorter steps for fewer tensors, since operations were traced."""
    monkeypatch.setattr(measuring, "QUICK_COMPILING", 1e6)
    training = idle_training(make_small_model(), SETTINGS)
    until = time.perf_counter() + 600
    table = profile_task(training, table_settings(SETTINGS), tmp_path, "trace", QUICK_SECONDS, quick_until=until)
    assert table.doubt == "for lack of time, only the full step was measured"
    everything = np.ones(len(table.names), bool)
    predicted = [table.predict_ms(mask) for mask in (training.task.head, everything)]
    assert 0 < predicted[0] < predicted[1] == pytest.approx(table.full_step_ms, rel=1e-6)
