"""The network that a board trains, in LiteRT, or in TensorFlow 2.6 or later. Part of board_train.py."""

import importlib
import importlib.util
import os
from typing import Any, Dict  # Python 3.6

import numpy as np
from board_device import HERE, fail, first_line
from board_sums import cross_entropy


class Network:
    """The signatures of the export, whose variables start with its weights and stay between calls.

    `part` is how many images one call computes.
    """

    name: str
    call: Any  # (name, **arrays): run a signature
    shapes: Any  # (name): of its inputs, by name

    def __init__(self, record):
        self.part = record["parts"][self.name]
        self.call("start")

    def step(self, parts, rate, seed):
        """Train on a batch: features, labels, weight of an image of each part. Returns mean loss and accuracy."""
        total, rng = np.zeros(2), np.random.default_rng(seed)
        for features, labels, weight in parts:
            missing = (0, self.part - len(labels))
            weights = np.pad(np.full(len(labels), weight, np.float32), missing)
            given, values = {**features, "labels": np.pad(labels, missing), "weights": weights}, {}
            for name, shape in self.shapes("gradients").items():
                draw = rng.standard_normal if name.startswith("normal") else rng.random  # of noise, of dropout
                values[name] = given[name] if name in given else draw(shape, np.float32)
            found = self.call("gradients", **values)
            total += found["loss"], found["accuracy"]
        self.call("update", rate=np.array([rate], np.float32))
        return total

    def infer(self, features):
        return self.call("infer", **{name: features[name] for name in self.shapes("infer")})

    def validate(self, examples, photos, has_time):
        """Mean loss and accuracy of `photos`, int [n], and how many there was time for, in a mixed order."""
        total, tested, order = np.zeros(2), 0, np.random.default_rng(0).permutation(photos)
        while tested < len(order) and (has_time() or not tested):
            rows = order[tested : tested + self.part]
            logits, labels = self.infer(examples.read(rows, 0))["logits"][: len(rows)], examples.labels[rows]
            total += len(rows) * cross_entropy(logits.astype(float), labels), (logits.argmax(axis=1) == labels).sum()
            tested += len(rows)
        return (*(total / tested).tolist(), tested)


class LiteRT(Network):
    """The signatures of train.tflite. `threads` is 1 if it is None: on a busy machine, two take longer."""

    name, file, package, wheel = "litert", "train.tflite", "ai_edge_litert", "ai-edge-litert"
    about = "LiteRT"

    def __init__(self, record, threads):
        interpreter = importlib.import_module("ai_edge_litert.interpreter").Interpreter
        try:
            self.interpreter = interpreter(model_path=str(HERE / self.file), num_threads=threads or 1)
        except (ValueError, RuntimeError, OSError) as error:
            fail(f"{HERE / self.file}: cannot be loaded: {first_line(error)}")
        self.runners: Dict[str, Any] = {}
        self.known: Dict[str, Any] = {}
        super().__init__(record)

    def runner(self, name):
        if name not in self.runners:
            self.runners[name] = self.interpreter.get_signature_runner(name)
        return self.runners[name]

    def call(self, name, **values):
        return self.runner(name)(**values)

    def shapes(self, name):
        if name not in self.known:
            details = self.runner(name).get_input_details().items()
            self.known[name] = {key: tuple(one["shape"]) for key, one in details}
        return self.known[name]


class TensorFlow(Network):
    """The signatures of train.pb, on the GPU if TensorFlow sees one. `threads` are all if it is None."""

    name, file, package, wheel = "tensorflow", "train.pb", "tensorflow", "tensorflow"

    def __init__(self, record, threads):
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # none of its own lines
        self.module, self.calls = importlib.import_module("tensorflow"), {}
        tf = self.module.compat.v1
        config = tf.ConfigProto(allow_soft_placement=True, intra_op_parallelism_threads=threads or 0)
        config.gpu_options.allow_growth = True  # a Jetson's GPU shares its memory with the rest
        graph = self.module.Graph()
        with graph.as_default():
            definition = tf.GraphDef()
            definition.ParseFromString((HERE / self.file).read_bytes())
            tf.import_graph_def(definition, name="")
        self.arguments: Dict[str, Any] = {}
        self.results: Dict[str, Any] = {}
        for operation in graph.get_operations():
            signature, _, key = operation.name.partition("/")
            if operation.type == "Placeholder":
                self.arguments.setdefault(signature, {})[key] = operation.outputs[0]
            elif key.startswith("result/"):
                self.results.setdefault(signature, {})[key[len("result/") :]] = operation.outputs[0]
        self.session = tf.Session(graph=graph, config=config)
        devices = [one.name for one in self.session.list_devices() if one.device_type == "GPU"]
        self.about = f"TensorFlow {self.module.__version__}, on {'the GPU' if devices else 'the processor'}"
        super().__init__(record)

    def call(self, name, **values):
        arguments = self.arguments.get(name, {})
        if name not in self.calls:
            self.calls[name] = self.session.make_callable(self.results[name], [*arguments.values()])
        try:
            return self.calls[name](*(values[key] for key in arguments))
        except self.module.errors.OpError as error:  # such as a kernel that an older version lacks
            raise RuntimeError(f"TensorFlow {self.module.__version__}: {first_line(error)}") from error

    def shapes(self, name):
        return {key: tuple(tensor.shape.as_list()) for key, tensor in self.arguments[name].items()}


ENGINES = {engine.name: engine for engine in (LiteRT, TensorFlow)}


def find_engine(record, wanted):
    """The type of the engine `wanted`; if that is None, the first that is installed and has its file."""
    possible = [one for one in ENGINES.values() if one.name in record["parts"] and wanted in (None, one.name)]
    if not possible:
        fail(f"--engine {wanted}: the export has no {ENGINES[wanted].file}: {record['missing'][wanted]}")
    found = [one for one in possible if importlib.util.find_spec(one.package) is not None]
    if not found:
        fail(f"{' or '.join(one.wheel for one in possible)} is missing; run: pip install {possible[0].wheel}")
    return found[0]
