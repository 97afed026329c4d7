"""What is predicted of the authors' own runs on a Raspberry Pi without one; only numbers that no machine changes."""

import pytest
from benchmark_recorded_board import COMPARED, NETWORK, flops_shares, steps_of, trace_shares
from paper_figures import RECORDED_STEPS
from traces import tx2_trace

import models
from elastic_trainer.timing.measuring import idle_training
from elastic_trainer.timing.trace import read_trace


@pytest.fixture(scope="module")
def training():
    return idle_training(models.build(NETWORK), NETWORK)


def recorded(scheme):
    return RECORDED_STEPS[scheme][0] / RECORDED_STEPS["full_training"][0]


def test_flops_predict_the_recorded_steps(training):
    shares = flops_shares(steps_of(training))
    assert shares == pytest.approx({"bn_plus_bias_training": 0.665, "traditional_tl_training": 0.337}, abs=0.001)
    assert all(abs(shares[scheme] - recorded(scheme)) < 0.06 for scheme in COMPARED)


def test_a_trace_of_another_board_predicts_them(training):
    shares = trace_shares(training, read_trace(tx2_trace("resnet50")))
    assert shares == pytest.approx({"bn_plus_bias_training": 0.670, "traditional_tl_training": 0.301}, abs=0.001)
    assert all(abs(shares[scheme] - recorded(scheme)) < 0.02 for scheme in COMPARED)
