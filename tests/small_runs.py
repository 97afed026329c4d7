"""Runs of the small network: settings that match it, and training with a run folder."""

import csv

from conftest import BATCH, CLASSES, SIZE, make_small_data, make_small_model, make_table

import train
from elastic_trainer.networks.tensors import tensor_names
from elastic_trainer.runs.run_log import RunLog
from elastic_trainer.settings import Settings

SETTINGS = Settings(
    model_name="mobilenetv2",
    alpha=0.5,
    input_size=SIZE,
    num_classes=CLASSES,
    batch_size=BATCH,
    optimizer="sgd",
    weights="none",
)


def run(folder, scheme, settings, model=None, table=None):
    """Train the small network by `scheme` and log to `folder`. Returns the model and the summary of the run."""
    model = model or make_small_model()
    more = {"table": table} if table else {}
    log = RunLog(folder, {"model_name": "small", "rho": settings.rho, "seed": 0}, tensor_names(model))
    with log:
        return model, scheme(model, make_small_data(), settings, log, **more)


def rows_of(path):
    """The rows of a CSV file, as {column: text}."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def train_and_read(folder, *, name="elastic_training"):
    """Three epochs of the scheme `name`: the summary, and the rows of metrics.csv."""
    settings = Settings(learning_rate=0.05, num_epochs=3, interval=1, rho=0.6)
    table = make_table(make_small_model()) if name == "elastic_training" else None
    _, summary = run(folder, getattr(train, name), settings, table=table)
    return summary, rows_of(folder / "metrics.csv")


def curve(folder, tag):
    """(step, value) of each point of a curve in TensorBoard's events, or None if there is no such curve."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    events.Reload()
    if tag not in events.Tags()["tensors"]:
        return None
    return [(event.step, float(make_ndarray(event.tensor_proto))) for event in events.Tensors(tag)]


def elastic_run(folder, settings, table):
    """Elastic training of the small network: the summary, a row of selections.csv for each selection, and these."""
    model = make_small_model()
    with RunLog(folder, {}, tensor_names(model)) as log:
        summary = train.elastic_training(model, make_small_data(), settings, log, table)
    return summary, rows_of(folder / "selections.csv")[:: len(tensor_names(model))], log.trainer.history.selections
