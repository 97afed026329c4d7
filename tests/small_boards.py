"""What the tests of board_train.py share: an export, photos, a finished run, and the program's modules."""

import json
import shutil
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import make_small_model
from environments import make_environment
from PIL import Image

from elastic_trainer.board.export import export_training
from elastic_trainer.networks.tensors import tensor_names
from elastic_trainer.settings import Settings

NAMES = ["ant", "bee", "cat"]


@pytest.fixture(scope="session")
def three_wheels(tmp_path_factory):
    """Python of an environment with three packages; TensorFlow is not among them."""
    packages = map(metadata.distribution, ("numpy", "pillow", "ai-edge-litert"))
    python = make_environment(tmp_path_factory.mktemp("environment"), packages)
    assert subprocess.run([python, "-c", "import tensorflow"], capture_output=True, check=False).returncode
    return python


@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    return make_photos(tmp_path_factory.mktemp("data") / "photos")


def make_photos(folder):
    """Noise around a colour of each class, 20 photos each, larger than the network's input."""
    rng = np.random.default_rng(0)
    for label, name in enumerate(NAMES):
        (folder / name).mkdir(parents=True)
        for index in range(20):
            pixels = rng.integers(0, 120, (12, 14, 3), dtype=np.uint8)
            pixels[..., label] += 100
            Image.fromarray(pixels).save(folder / name / f"{index}.png")
    return folder


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    return make_export(tmp_path_factory.mktemp("export") / "board")


def make_export(folder, **changed):
    """The folder of an export for both engines, in which a step has two parts; `changed`: its other settings."""
    settings = Settings(
        num_epochs=4,
        batch_size=6,
        learning_rate=0.3,
        warmup=0.1,
        gradient_clipping=0.05,
        micro_batch=4,
        seed=3,
        augment="flip",
        test_fraction=0.25,
        **changed,
    )
    model = make_small_model()
    text = export_training(model, upper_mask(model), settings, NAMES, folder)
    assert "train.pb" in text and "6 images a step (8 of" in text and "board_train.py" in text
    return folder


def upper_mask(model):
    return np.array(["stem" not in name for name in tensor_names(model)])


@pytest.fixture(scope="session")
def board_modules(exported):
    """The modules of the board's program, in this process."""
    sys.path.insert(0, str(exported))
    try:
        import board_engines
        import board_head
        import board_photos
        import board_train

        return SimpleNamespace(engines=board_engines, head=board_head, photos=board_photos, train=board_train)
    finally:
        sys.path.remove(str(exported))


def run(python, folder, *arguments, code=0):
    """What a run of the program in `folder` prints, which ends with the status `code`."""
    done = subprocess.run(
        [python, folder / "board_train.py", *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


def weights_of(output):
    with np.load(output / "weights.npz") as file:
        return {name: file[name] for name in file.files if name != "id"}


def result_of(output):
    return json.loads((output / "result.json").read_text())


@pytest.fixture(scope="session")
def trained(three_wheels, exported, photos, tmp_path_factory):
    """The output of an unbroken run."""
    output = tmp_path_factory.mktemp("trained") / "out"
    run(three_wheels, exported, "--data_dir", photos, "--output", output)
    return output


def changed_copy(exported, folder, script, old, new):
    """A copy of the folder for a board, in which a script has `new` in the place of `old`."""
    shutil.copytree(exported, folder)
    replace_in(folder / script, old, new)
    return folder


def replace_in(script, old, new):
    text = script.read_text()
    assert old in text
    script.write_text(text.replace(old, new))
