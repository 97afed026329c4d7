"""Files that others made, given to the commands: code in them does not run, and they are refused in one line."""

import json
import sys
import zipfile
from pathlib import Path

import h5py
import keras
import numpy as np
import pytest
import zoo
from command_line import run_here
from conftest import make_small_model
from PIL import Image
from small_images import encoded, load_photos, write_noise

import profiler
from elastic_trainer.networks.saved_model import load_model, save_model
from elastic_trainer.runs.checkpoint import Checkpoints, State
from elastic_trainer.system.errors import UserError
from elastic_trainer.timing import trace
from main import main


def call_of(module, name):
    """The config of a layer that calls a function of a module, in Keras' safe mode."""
    function = {"module": module, "class_name": "function", "config": name, "registered_name": name}
    settings = {"name": "evil", "function": function, "arguments": {}}
    return {"module": "keras.layers", "class_name": "Lambda", "config": settings, "registered_name": None}


def class_of(module, name):
    return {"module": module, "class_name": name, "config": {"name": "evil"}, "registered_name": name}


EVIL = {
    "a module of this folder": class_of("evil_module", "Evil"),
    "a function of the system": call_of("os", "system"),
    "a function of Python": call_of("builtins", "exec"),
    "a file that Keras fetches": call_of("keras.utils", "get_file"),
    "a model that Keras loads": call_of("keras.models", "load_model"),
    "safe mode off": class_of("keras.config", "enable_unsafe_deserialization"),
    "inside of Keras": class_of("keras.src.saving.serialization_lib", "SafeModeScope"),
}


def rewritten(path, change, **more):
    """The .keras file at `path` with another config, from a function of the text of the old one."""
    with zipfile.ZipFile(path) as file:
        contents = {name: file.read(name) for name in file.namelist()}
    contents["config.json"] = change(contents["config.json"].decode()).encode()
    with zipfile.ZipFile(path, "w", **more) as file:
        for name, content in contents.items():
            file.writestr(name, content)
    return path


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder on the import path with photos, a model my.keras, and a module that must not be imported."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "evil_module.py").write_text("raise SystemExit('this code ran')")
    write_noise(tmp_path / "photos")
    save_model(zoo.branches((12, 12, 3), 2), tmp_path / "my.keras")
    yield tmp_path
    assert "evil_module" not in sys.modules


def refusal(script, *words):
    """The line in which a command refuses what it is given."""
    with pytest.raises(UserError) as caught:
        run_here({"main.py": main, "profiler.py": profiler.main}[script], script, *words)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def ways(place, file):
    """How main.py is given a .keras file; the words before the last one name its flag."""
    data = ["--dataset_name", "image_folder", "--data_dir", place / "photos", "--logdir", place]
    return [
        [*data, "--input_size", 12, "--model_name", file],
        [*data, "--input_size", 12, "--model_name", f"{Path(zoo.__file__)}:branches", "--weights", file],
        [*data, "--evaluate", file],
    ]


@pytest.mark.parametrize("kind", EVIL)
def test_a_model_file_brings_no_code_of_its_own_and_calls_none_that_is_no_part_of_a_network(kind, place):
    def with_evil(text):
        config = json.loads(text)
        config["config"]["layers"].append({**EVIL[kind], "name": "evil", "inbound_nodes": []})
        return json.dumps(config, separators=(",", ":")).replace("module", "mod\\u0075le")

    file = rewritten(place / "my.keras", with_evil)
    for words in ways(place, file):
        line = refusal("main.py", *words)
        assert "Keras cannot load it: " in line or words[-2] == "--weights", line
    with pytest.raises(UserError, match="Keras cannot load it: "):
        load_model(file, "--evaluate")


def test_safe_mode_is_on_even_where_another_part_of_the_program_switched_it_off(place):
    model = keras.Sequential([keras.Input((12, 12, 3)), keras.layers.Lambda(lambda x: x + 1), keras.layers.Flatten()])
    model.save(place / "lambda.keras")
    for words in ways(place, place / "lambda.keras")[::2]:
        assert "it has a Lambda layer, whose code is not run from a file" in refusal("main.py", *words)


def test_an_archive_that_unpacks_to_far_more_than_it_holds_is_refused_before_that(place):
    rewritten(place / "my.keras", lambda text: text + 200_000_000 * " ", compression=zipfile.ZIP_DEFLATED)
    for words in ways(place, place / "my.keras"):
        assert "unpacks 0.2 MB to 200 MB" in refusal("main.py", *words), words
    checkpoints = Checkpoints(place / "checkpoints")
    checkpoints.save(1, State({"weights": np.zeros(3)}, {}))
    np.savez_compressed(checkpoints.folder / "step-0000000002.npz", weights=np.zeros(200_000_000, np.uint8))
    found = Checkpoints(checkpoints.folder).latest()
    assert found is not None and found.arrays["weights"].shape == (3,)


class Boom:
    def __reduce__(self):
        return (sys.exit, ("this code ran",))


def test_pickles_in_arrays_are_not_read(place, capsys):
    boom = np.array([Boom()], object)
    np.savez(place / "step-0000000001.npz", state=boom)
    with pytest.raises(UserError, match="every checkpoint is damaged"):
        Checkpoints(place).latest()
    assert "allow_pickle=False" in capsys.readouterr().err


def test_weights_that_are_in_another_file_of_this_machine_are_not_read(place):
    model = make_small_model()
    model.save_weights(place / "my.weights.h5")
    (place / "secret").write_bytes(bytes(4096))
    with h5py.File(place / "my.weights.h5", "r+") as file:
        names = []
        file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
        shape = file[names[0]].shape
        del file[names[0]]
        file.create_dataset(names[0], shape, "float32", external=[(str(place / "secret"), 0, 4096)])
    network = ["--dataset_name", "digits", "--model_name", f"{Path(zoo.__file__)}:branches", "--input_size", 12]
    line = refusal("main.py", *network, "--logdir", place, "--weights", place / "my.weights.h5")
    assert "is damaged or does not fit" in line and "is in another file" in line


def test_a_trace_is_read_up_to_a_size_and_only_if_it_is_one(place, monkeypatch):
    words = ["--model_name", "mobilenetv2", "--input_size", 32, "--num_classes", 2, "--logdir", place, "--from_trace"]
    (place / "some.xplane.pb").write_bytes(b"\xff" * 2000)
    assert "not an XSpace" in refusal("profiler.py", *words, place / "some.xplane.pb")
    monkeypatch.setattr(trace, "MAX_TRACE_MB", 0.001)
    assert "the limit is 0.001 MB; trace fewer steps" in refusal("profiler.py", *words, place / "some.xplane.pb")


def test_images_of_impossible_sizes_are_left_out(place, capsys):
    png = bytearray(encoded(Image.new("RGB", (4, 4)), "PNG"))
    png[16:24] = (2**31 - 1).to_bytes(4, "big") * 2  # width and height
    (place / "photos" / "train" / "ant" / "broken.png").write_bytes(png)
    assert load_photos(place / "photos", 12, 4).train_count == 12
    assert (
        "skipped (unreadable): 1 of 22 images; the first: " in (line := capsys.readouterr().out)
        and "broken.png" in line
    )
