"""A board. Its photos stay on it: it sends tensors that it trained, sums of features, and how well models do."""

from __future__ import annotations

from typing import Any

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from elastic_fleet import task
from elastic_fleet.strategy import ARRAYS, CONFIG, METRICS, SUMS, from_record, to_record

app = ClientApp()


def _board(message: Message, context: Context) -> tuple[dict[str, Any], Any, task.Photos]:
    """The settings of this board, the network with the server's weights, and the photos."""
    config = {**context.run_config, **context.node_config}
    if "rho" not in context.node_config and "partition-id" in config:
        rhos = str(config["rhos"]).split()
        config["rho"] = float(rhos[int(config["partition-id"]) % len(rhos)])
    model = task.make_network(config)
    task.set_arrays(model, from_record(message.content.array_records[ARRAYS]))
    return config, model, task.load_photos(config)


@app.train()
def train(message: Message, context: Context) -> Message:
    """A round; the reply has the tensors that have trained."""
    number = int(message.content.config_records[CONFIG]["server-round"])
    config, model, photos = _board(message, context)
    trained, metrics = task.train(model, photos, config, number)
    return Message(RecordDict({ARRAYS: to_record(trained), METRICS: MetricRecord(metrics)}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """How well the server's model does on this board's test photos."""
    _, model, photos = _board(message, context)
    metrics = task.evaluate(model, photos.test_x, photos.test_y)
    return Message(RecordDict({METRICS: MetricRecord(metrics)}), reply_to=message)


@app.query()
def sums(message: Message, context: Context) -> Message:
    """Sums of features, of which the server makes a head."""
    _, model, photos = _board(message, context)
    arrays = dict(zip(SUMS, task.feature_sums(model, photos), strict=True))
    return Message(RecordDict({ARRAYS: to_record(arrays)}), reply_to=message)


@app.query("alone")
def alone(message: Message, context: Context) -> Message:
    """Of a simulation: what this board reaches alone, in the same rounds, on the test digits of all boards."""
    config, model, photos = _board(message, context)
    task.set_arrays(model, task.with_head(task.get_arrays(model), task.feature_sums(model, photos)))
    for number in range(1, int(config["rounds"]) + 1):
        task.train(model, photos, config, number)
    everything = task.load_photos({**config, "partition-id": 0, "num-partitions": 1})
    metrics = task.evaluate(model, everything.test_x, everything.test_y)
    return Message(RecordDict({METRICS: MetricRecord(metrics)}), reply_to=message)
