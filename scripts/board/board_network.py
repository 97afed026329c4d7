"""The network that a board trains. Part of board_train.py."""

import os
import time

import numpy as np
from board_device import HERE, fail, lock, show, write_json
from board_sums import cross_entropy

PROFILE_ROUNDS = 30


class Network:
    """The signatures of one selection in a new engine; the variables start with the weights of the export."""

    def __init__(self, engine, selection):
        self.engine, self.part, self.selection, self.shapes = engine, engine.part, selection, {}
        self.call("start")

    def call(self, name, **values):
        suffix = "" if name in ("start", "load", "state", "fill") else self.selection["suffix"]
        return self.engine.call(name + suffix, values)

    def inputs(self, name):
        """The shape of each input but labels and weights."""
        if name not in self.shapes:
            found = self.engine.inputs(name + self.selection["suffix"])
            self.shapes[name] = {key: shape for key, shape in found.items() if key not in ("labels", "weights")}
        return self.shapes[name]

    def step(self, parts, rate, seed):
        """Train on a batch: features, labels, weight of an image of each part. Returns mean loss and accuracy."""
        total, rng = np.zeros(2), np.random.default_rng(seed)
        for features, labels, weight in parts:
            missing = (0, self.part - len(labels))
            values = {
                "labels": np.pad(labels, missing),
                "weights": np.pad(np.full(len(labels), weight, np.float32), missing),
            }
            for name, shape in self.inputs("gradients").items():
                draw = rng.standard_normal if name.startswith("normal") else rng.random  # of noise, of dropout
                values[name] = features[name] if name in features else draw(shape, np.float32)
            found = self.call("gradients", **values)
            total += found["loss"], found["accuracy"]
        self.call("update", rate=np.array([rate], np.float32))
        return total

    def infer(self, features):
        return self.call("infer", **{name: features[name] for name in self.inputs("infer")})

    def validate(self, examples, photos, has_time):
        """Mean loss and accuracy of `photos`, int [n], and how many there was time for, in a mixed order."""
        total, tested, order = np.zeros(2), 0, np.random.default_rng(0).permutation(photos)
        while tested < len(order) and (has_time() or not tested):
            rows = order[tested : tested + self.part]
            logits, labels = self.infer(examples.read(rows, 0))["logits"][: len(rows)], examples.labels[rows]
            total += len(rows) * cross_entropy(logits.astype(float), labels), (logits.argmax(axis=1) == labels).sum()
            tested += len(rows)
        return (*(total / tested).tolist(), tested)


def profile(record, engine_type, threads):
    """Measure each selection in turns, and write the medians to times.json."""
    lock(HERE)
    if not os.access(HERE, os.W_OK):
        fail(f"{HERE}: cannot be written to; --profile writes times.json there")
    networks = [Network(engine_type(record, threads), selection) for selection in record["selections"]]
    rng, part, batch = np.random.default_rng(0), networks[0].part, record["recipe"]["batch_size"]
    images = rng.random((part, record["size"], record["size"], 3), np.float32) * 255
    print(f"measuring in {networks[0].engine.about()}")
    times = np.zeros((PROFILE_ROUNDS + 1, len(networks), 3))  # the first round is not counted
    for number in range(len(times)):
        for index, network in enumerate(networks):
            moments = [time.perf_counter()]
            features = network.call("features", images=images)
            moments.append(time.perf_counter())
            network.infer(features)
            moments.append(time.perf_counter())
            network.step([(features, np.zeros(part, np.int32), 1 / batch)] * -(-batch // part), 0.0, 0)
            times[number, index] = 1e3 * np.diff([*moments, time.perf_counter()])
        show(f"measuring: round {number} of {PROFILE_ROUNDS}")
    rows = []
    show("")
    for one, (features, infer, step) in zip(record["selections"], np.median(times[1:], axis=0).tolist()):
        row = {"name": one["name"], "tensors": one["tensors"], "step_ms": step}
        rows.append({**row, "features_ms": features / part, "infer_ms": infer / part})
        print(f"{one['name']}: {step:.2f} ms a step of {batch}; an image: features {features / part:.2f} ms, "
              f"inference from them {infer / part:.2f} ms")  # fmt: skip
    about = {"id": record["id"], "engine": engine_type.name, "batch_size": batch, "threads": threads}
    write_json(HERE / "times.json", {**about, "machine": list(os.uname()), "selections": rows})
    print(f"written to {HERE / 'times.json'}")
