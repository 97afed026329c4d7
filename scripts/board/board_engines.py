"""What computes on a board: LiteRT, or TensorFlow 2.6 or later. Part of board_train.py.

Both call a signature of the export by its name, with arrays by name, say the shapes of its inputs, and keep the
variables between calls. `part` is how many images they compute at a time.
"""

import importlib
import importlib.util
import os
from typing import Any, Dict  # Python 3.6

from board_device import HERE, fail, first_line


class LiteRT:
    """The signatures of train.tflite. `threads` is 1 if it is None: on a busy machine, two take longer."""

    name, file, package, wheel = "litert", "train.tflite", "ai_edge_litert", "ai-edge-litert"

    def __init__(self, record, threads):
        self.part, self.runners = record["parts"][self.name], {}
        interpreter = importlib.import_module("ai_edge_litert.interpreter").Interpreter
        try:
            self.interpreter = interpreter(model_path=str(HERE / self.file), num_threads=threads or 1)
        except (ValueError, RuntimeError, OSError) as error:
            fail(f"{HERE / self.file}: cannot be loaded: {first_line(error)}")

    def runner(self, name):
        if name not in self.runners:
            self.runners[name] = self.interpreter.get_signature_runner(name)
        return self.runners[name]

    def call(self, name, values):
        return self.runner(name)(**values)

    def inputs(self, name):
        return {key: tuple(one["shape"]) for key, one in self.runner(name).get_input_details().items()}

    def about(self):
        return "LiteRT"


class TensorFlow:
    """The signatures of train.pb, on the GPU if TensorFlow sees one. `threads` are all if it is None."""

    name, file, package, wheel = "tensorflow", "train.pb", "tensorflow", "tensorflow"

    def __init__(self, record, threads):
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # none of its own lines
        self.part, self.calls = record["parts"][self.name], {}
        self.module = importlib.import_module("tensorflow")
        tf = self.module.compat.v1
        config = tf.ConfigProto(allow_soft_placement=True, intra_op_parallelism_threads=threads or 0)
        config.gpu_options.allow_growth = True  # a Jetson's GPU shares its memory with the rest
        self.graph = self.module.Graph()
        with self.graph.as_default():
            definition = tf.GraphDef()
            definition.ParseFromString((HERE / self.file).read_bytes())
            tf.import_graph_def(definition, name="")
        self.arguments: Dict[str, Any] = {}
        self.results: Dict[str, Any] = {}
        for operation in self.graph.get_operations():
            signature, _, key = operation.name.partition("/")
            if operation.type == "Placeholder":
                self.arguments.setdefault(signature, {})[key] = operation.outputs[0]
            elif key.startswith("result/"):
                self.results.setdefault(signature, {})[key[len("result/") :]] = operation.outputs[0]
        self.session = tf.Session(graph=self.graph, config=config)

    def call(self, name, values):
        arguments = self.arguments.get(name, {})
        if name not in self.calls:
            self.calls[name] = self.session.make_callable(self.results[name], [*arguments.values()])
        try:
            return self.calls[name](*(values[key] for key in arguments))
        except self.module.errors.OpError as error:  # such as a kernel that an older version lacks
            raise RuntimeError(f"TensorFlow {self.module.__version__}: {first_line(error)}") from error

    def inputs(self, name):
        return {key: tuple(tensor.shape.as_list()) for key, tensor in self.arguments[name].items()}

    def about(self):
        devices = [one.name for one in self.session.list_devices() if one.device_type == "GPU"]
        return f"TensorFlow {self.module.__version__}, on {'the GPU' if devices else 'the processor'}"


ENGINES = {engine.name: engine for engine in (LiteRT, TensorFlow)}


def find_engine(record, wanted):
    """The type of the engine `wanted`; if that is None, the first that is installed and has its file."""
    if wanted is not None and wanted not in record["parts"]:
        fail(f"--engine {wanted}: there is no {ENGINES[wanted].file} here; main.py --export train_graph writes it")
    possible = [one for one in ENGINES.values() if one.name in record["parts"] and wanted in (None, one.name)]
    found = [one for one in possible if importlib.util.find_spec(one.package) is not None]
    if not found:
        fail(f"{' or '.join(one.wheel for one in possible)} is missing; run: pip install {possible[0].wheel}")
    return found[0]
