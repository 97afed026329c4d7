"""The events that a run writes for TensorBoard."""

from conftest import make_small_model, make_table
from small_runs import run

import train
from elastic_trainer.settings import Settings


def test_run_writes_every_curve(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model = make_small_model()
    settings = Settings(learning_rate=0.05, num_epochs=2, interval=1, rho=0.6)
    run(tmp_path, train.elastic_training, settings, model, table=make_table(model))
    events = EventAccumulator(str(tmp_path), size_guidance={"tensors": 0})
    events.Reload()
    tags = set(events.Tags()["tensors"])
    curves = {f"{split}/{what}" for split in ("train", "test") for what in ("loss", "accuracy")}
    over_time = {f"over_training_seconds/{curve.replace('/', '_')}" for curve in curves}
    others = {
        "budget/rho",
        "budget/slowdown",
        "budget/correction",
        "learning_rate",
        "step_time/measured_ms",
        "step_time/budget_ms",
        "selection/tensors_by_epoch",
    }
    assert curves | over_time | others <= tags
    assert [event.step for event in events.Tensors("test/accuracy")] == [6, 12]
