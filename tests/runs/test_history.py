"""The history of a run adds up FLOPs, peak memory, energy and the time of full training."""

import json
import time

import numpy as np
import pytest
from conftest import make_small_model
from small_networks import built_optimizer
from small_runs import curve, rows_of, train_and_read

from elastic_trainer.engine.step import TrainStep
from elastic_trainer.engine.task import ImageClassification
from elastic_trainer.runs.history import Clocks
from elastic_trainer.runs.summary import full_training_ms
from elastic_trainer.selection.select import Selection
from elastic_trainer.system.memory import peak_memory_mb
from elastic_trainer.timing.flops import count_flops


def test_a_run_records_its_peak_memory_and_the_sum_of_the_flops_of_its_steps(tmp_path):
    full, rows = train_and_read(tmp_path / "full", name="full_training")
    flops = [float(row["train_flops"]) for row in rows]
    assert flops[0] > 0 and flops == [flops[0], 2 * flops[0], full["train_flops"]]
    assert full["train_flops"] == pytest.approx(
        18 * flops_of(np.ones(len(make_small_model().trainable_variables), bool))
    )
    peaks = [float(row["peak_memory_mb"]) for row in rows]
    assert full["peak_memory_mb"] == max(peaks) and full["gpu_peak_memory_mb"] is None
    assert 50 < peaks[0] <= 1.01 * peak_memory_mb()  # Linux counts pages by processor, so it is off by a few
    assert curve(tmp_path / "full", "meters/peak_memory_mb")[-1][1] == pytest.approx(peaks[-1])
    elastic, _ = train_and_read(tmp_path / "elastic")
    rows = rows_of(tmp_path / "elastic" / "selections.csv")
    masks = np.array([row["chosen"] == "1" for row in rows]).reshape(3, -1)  # two re-selections
    assert elastic["train_flops"] == pytest.approx(sum(6 * flops_of(mask) for mask in masks))
    assert elastic["train_flops"] < full["train_flops"]
    assert curve(tmp_path / "elastic", "meters/train_flops")[-1] == (
        18,
        pytest.approx(elastic["train_flops"], rel=1e-6),
    )


def flops_of(mask):
    """Of a step that trains this selection."""
    model = make_small_model()
    step = TrainStep(ImageClassification(model), built_optimizer("sgd", model), 4, mask)
    return sum(count_flops(step.graph).values())


def test_full_training_time_follows_the_slowdown_of_each_stretch():
    """Disturbed single passes count nothing; an interval without passes has the slowdown of its selection."""
    selections = []
    for slowdown, passes in ((3.0, [1.5, 9.0, 1.5]), (1.5, [2.0]), (2.0, []), (1.0, [1.0, 1.0, 1.0, 3.0, 3.0, 3.0])):
        selection = Selection(np.ones(1, bool), budget_step_ms=50.0 * slowdown, rho=0.5, slowdown=slowdown)
        selection.step_ms, selection.slowdowns = [1.0] * 6, passes
        selections.append(selection)
    assert full_training_ms(selections) == pytest.approx(6 * 100 * (1.5 + 2 + 2 + 2))


def test_energy_is_counted_only_during_training():
    clocks, total = Clocks(), [0.0]
    clocks.meter = lambda: total[0]
    for spent in (1, 2):
        with clocks.running("training"):
            total[0] += spent
            with clocks.running("selection"):
                total[0] += 10  # part of training
            with clocks.paused("training"):
                total[0] += 100
        with clocks.running("validation"), clocks.paused("training"):
            total[0] += 1000
    assert clocks.joules == 1 + 2 + 2 * 10
    assert len(clocks.spans) == 4 and all(start <= end for start, end in clocks.spans)
    restored = Clocks(**json.loads(json.dumps(clocks.to_record())))
    assert restored.joules == 23 and len(restored.spans) == 4
    with restored.running("training"):  # resumed on a machine without a meter
        pass
    assert restored.joules is None


def test_a_clock_that_is_set_back_while_training_leaves_the_stretch_as_long_as_it_took(monkeypatch):
    day = [1e9]
    monkeypatch.setattr("time.time", lambda: day[0])
    clocks = Clocks()
    with clocks.running("training"):
        day[0] -= 7200
    [(start, end)] = clocks.spans
    assert start == pytest.approx(1e9, abs=0.1) and end - start == pytest.approx(clocks.seconds("training"), abs=1e-6)
    assert Clocks(**clocks.to_record()).clock_shift == pytest.approx(-7200, abs=0.1)


def test_the_time_of_a_run_counts_from_the_start_of_its_program():
    start = time.perf_counter()
    clocks = Clocks(elapsed=5.0)
    time.sleep(0.1)
    clocks.count_from(start - 10.0)
    assert clocks.elapsed() - (time.perf_counter() - start) == pytest.approx(15.0, abs=0.05), "nothing is left out"
