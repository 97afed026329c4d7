"""train.pb trains in the TensorFlow of a board as train.tflite does in LiteRT."""

import fcntl
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from small_boards import changed_copy, make_export, replace_in, result_of, run, weights_of

from elastic_trainer.board.graph_file import graph_file
from elastic_trainer.board.signatures import TrainingFunctions
from elastic_trainer.engine.optimizers import make_optimizer
from elastic_trainer.system.errors import UserError

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ai_edge_litert") is None, reason="ai-edge-litert is not installed"
)
pytest_plugins = ["small_boards"]
ROOT = Path(__file__).parents[3]


def old_tensorflow(version: str, python_version: str) -> Path:
    """Python of an environment with this TensorFlow and Pillow alone, made if it is missing; else the test skips."""
    places = [*map(str, (Path.home() / ".pyenv" / "versions").glob(f"{python_version}.*/bin/python"))]
    places.append(shutil.which(f"python{python_version}") or sys.executable)
    wanted = f"import sys; sys.exit('%d.%d' % sys.version_info[:2] != '{python_version}')"
    runs = [
        one for one in places if not subprocess.run([one, "-c", wanted], capture_output=True, check=False).returncode
    ]
    if not runs:
        pytest.skip(f"there is no Python {python_version} here")
    folder = ROOT / f".venv-tensorflow-{version}"
    python = folder / "bin" / "python"
    commands = (
        f"{runs[0]} -m venv --clear {folder}",
        f"{python} -m pip install -q -U pip<22",
        f"{python} -m pip install -q tensorflow=={version} protobuf<3.20 pillow",
    )
    with (ROOT / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two tests may ask for it
        if not (folder / "complete").exists():
            for command in commands:
                done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
                if done.returncode:
                    pytest.skip(f"TensorFlow {version} cannot be installed: {done.stderr.strip().splitlines()[-1]}")
            (folder / "complete").touch()
    return python


@pytest.fixture(scope="session")
def both(three_wheels, photos, tmp_path_factory):
    """An export whose head starts and ends with a closed form, and the output of a run in LiteRT."""
    folder = tmp_path_factory.mktemp("both")
    exported = make_export(folder / "board", starts_with_head=True, average_head=True)
    run(three_wheels, exported, "--data_dir", photos, "--output", folder / "out")
    return exported, folder / "out"


@pytest.mark.parametrize(("version", "python_version"), [(None, None), ("2.6.2", "3.6"), ("2.7.4", "3.7")])
def test_the_same_folder_trains_alike_in_every_engine(version, python_version, both, photos, tmp_path):
    python = sys.executable if version is None else old_tensorflow(version, python_version)
    done = run(python, both[0], "--data_dir", photos, "--output", tmp_path, "--engine", "tensorflow")
    assert f"TensorFlow {version or tf.__version__}, on the " in done.stdout
    found, expected = result_of(tmp_path), result_of(both[1])
    assert len(found["epochs"]) == 4 and found["before_training"]["is_closed_form"]
    for name in ("train_loss", "train_accuracy"):
        rows, others = ([row[name] for row in result["epochs"]] for result in (found, expected))
        np.testing.assert_allclose(rows, others, rtol=1e-3, err_msg=name)
    assert (tmp_path / "model.tflite").stat().st_size == (both[1] / "model.tflite").stat().st_size


def test_a_run_in_tensorflow_that_is_killed_ends_as_an_unbroken_one_bit_for_bit(exported, photos, tmp_path):
    words = ("--data_dir", photos, "--engine", "tensorflow", "--output")
    run(sys.executable, exported, *words, tmp_path / "whole")
    line = '        state["seconds"] += time.monotonic() - start\n'
    kill = '        if state["step"] == 11: import signal; signal.raise_signal(9)\n'
    killed = changed_copy(exported, tmp_path / "board", "board_run.py", line, line + kill)
    replace_in(killed / "board_device.py", "CHECKPOINT_SECONDS = 120", "CHECKPOINT_SECONDS = 0")
    run(sys.executable, killed, *words, tmp_path / "out", code=-9)
    run(sys.executable, exported, *words, tmp_path / "out", "--resume")
    for name, value in weights_of(tmp_path / "whole").items():
        np.testing.assert_array_equal(weights_of(tmp_path / "out")[name], value)


def test_an_engine_that_is_missing_is_named(three_wheels, exported, photos):
    refused = run(three_wheels, exported, "--data_dir", photos, "--engine", "tensorflow", code=2)
    assert "tensorflow is missing; run: pip install tensorflow" in refused.stderr


def _file_of(function) -> bytes:
    specs = {"images": tf.TensorSpec((2, 4, 4, 3))}
    return graph_file({"features": tf.function(function, autograph=False).get_concrete_function(**specs)})


def test_what_tensorflow_2_6_lacks_is_named():
    definition = tf.compat.v1.GraphDef()
    definition.ParseFromString(_file_of(lambda images: {"x": tf.matmul(images, images, transpose_b=True)}))
    [product] = [node for node in definition.node if node.op.startswith("BatchMatMul")]
    assert "grad_x" not in product.attr and definition.versions.producer == 808
    with pytest.raises(UserError, match=r"--export: TensorFlow 2.6 has no operation CollectiveAllToAllV2"):
        _file_of(lambda images: {"x": _later(images)})
    with pytest.raises(UserError, match="has a loop or a condition"):
        _file_of(lambda images: {"x": tf.while_loop(lambda x: tf.reduce_sum(x) < 9, lambda x: [x + 1], [images])[0]})


def _later(images):
    one = tf.constant(1)
    return tf.raw_ops.CollectiveAllToAllV2(
        input=images, group_size=one, group_key=one, instance_key=one, ordering_token=[]
    )


def test_tensors_with_equal_values_are_all_fed():
    """Of a non-negative tensor, ReLU is the same: two tensors that pass the cut have one place among the features."""
    keras.utils.set_random_seed(0)
    images = keras.Input((6, 6, 3))
    below = keras.layers.ReLU()(keras.layers.Conv2D(4, 3)(images))
    branches = [keras.layers.Conv2D(2, 1, name=f"up{k}")(x) for k, x in enumerate((below, keras.layers.ReLU()(below)))]
    rows = keras.layers.GlobalAveragePooling2D()(keras.layers.Concatenate()(branches))
    model = keras.Model(images, keras.layers.Dense(3)(rows))
    mask = np.array([variable.path.startswith(("up", "dense")) for variable in model.trainable_variables])
    optimizer = make_optimizer("sgd", 0.05, 1e-3, 100, 0.05, [])
    optimizer.build(model.trainable_variables)
    traced = TrainingFunctions(model, optimizer, mask, 2, formulas={}).traced
    pixels = np.random.default_rng(0).uniform(0, 255, (2, 6, 6, 3)).astype(np.float32)
    features = traced["features"](images=tf.constant(pixels))
    wanted = {name: features[name] for name in traced["infer"].structured_input_signature[1]}
    np.testing.assert_allclose(traced["infer"](**wanted)["logits"], model(pixels), rtol=1e-4, atol=1e-4)
