"""Runs of the small network: settings that match it, and training with a run folder."""

from conftest import BATCH, CLASSES, SIZE, make_small_data, make_small_model

from elastic_trainer.networks.tensors import tensor_names
from elastic_trainer.runs.run_log import RunLog
from elastic_trainer.selection.schemes import make_budget
from elastic_trainer.settings import NetworkSettings

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
