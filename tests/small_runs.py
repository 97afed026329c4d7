"""Runs of the small network: settings that match it, and training with a run folder."""

import csv

from conftest import BATCH, CLASSES, SIZE, make_small_data, make_small_model, make_table

import train
from elastic_trainer.networks.tensors import head_mask, tensor_names
from elastic_trainer.runs.run_log import RunLog
from elastic_trainer.selection.schemes import make_budget
from elastic_trainer.settings import NetworkSettings, Settings

SETTINGS = NetworkSettings(
    model_name="mobilenetv2",
    alpha=0.5,
    input_size=SIZE,
    num_classes=CLASSES,
    batch_size=BATCH,
    optimizer="sgd",
    augment="none",
    weights="none",
)


def run(folder, scheme, settings, model=None, table=None):
    """Train the small network by `scheme` and log to `folder`. Returns the model and the summary of the run."""
    model = model or make_small_model()
    more = {"budget": make_budget(model, make_small_data(), settings, table)} if table else {}
    log = RunLog(folder, {"model_name": "small", "rho": settings.rho, "seed": 0}, tensor_names(model))
    with log:
        return model, log.finish(scheme(model, make_small_data(), settings, log, **more))


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def trained(folder, *, name="elastic_training"):
    model, data = make_small_model(), make_small_data()
    settings = Settings(learning_rate=0.05, num_epochs=3, interval=1, rho=0.6)
    budget = make_budget(model, data, settings, make_table(model)) if name == "elastic_training" else None
    names = [str(k) for k in range(len(model.trainable_variables))]
    with RunLog(folder, {"train_type": name}, names) as run:
        summary = run.finish(train.train(name, model, data, settings, run, budget))
    with (folder / "metrics.csv").open(newline="") as file:
        return summary, [*csv.DictReader(file)]


def curve(folder, tag):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    events.Reload()
    if tag not in events.Tags()["tensors"]:
        return None
    return [(event.step, float(make_ndarray(event.tensor_proto))) for event in events.Tensors(tag)]


def elastic(tmp_path, settings, table):
    model = make_small_model()
    budget = make_budget(model, make_small_data(), settings, table)
    log = RunLog(tmp_path, {}, tensor_names(model))
    with log:
        summary = log.finish(train.elastic_training(model, make_small_data(), settings, log, budget))
    with (tmp_path / "selections.csv").open(newline="") as file:
        return summary, list(csv.DictReader(file))[:: len(head_of(model))], log._history.intervals


def head_of(model):
    return head_mask(model)
