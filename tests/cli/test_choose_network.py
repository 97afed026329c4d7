"""Which network a run on photos takes where its name is not given."""

from contextlib import nullcontext
from dataclasses import replace
from math import inf
from pathlib import Path
from urllib.error import URLError

import keras
import numpy as np
import pytest
from command_line import command
from conftest import make_small_model
from PIL import Image
from small_images import write_noise

from elastic_trainer.cli import resolve
from elastic_trainer.cli.commands import parse_profiler, parse_training
from elastic_trainer.datasets.decoding import smaller_side
from elastic_trainer.datasets.named import find
from elastic_trainer.networks import candidates as networks
from elastic_trainer.profiling.memory_check import TracedSteps
from elastic_trainer.runs.reader import CONFIG
from elastic_trainer.settings import Settings
from elastic_trainer.system.files import write_record

BEST, SMALL = "efficientnetlite0", "mobilenetv2"


@pytest.fixture
def photos(tmp_path):
    """Flags of 12 training and 9 test photos of 200×300 pixels, one of them broken."""
    folder = write_noise(tmp_path / "photos")
    for index, path in enumerate(sorted(folder.rglob("*.png"))):
        Image.new("RGB", (300, 200), (index, 0, 0)).save(path)
    (folder / "train" / "ant" / "0.png").write_bytes(b"none")
    return ["--dataset_name", "image_folder", "--data_dir", str(folder), "--logdir", str(tmp_path / "logs")]


def chosen(words, seconds, monkeypatch, pass_ms):
    """The network, its width and size, where a pass takes `pass_ms` an image at 128 pixels, by network."""
    built: list[Settings] = []

    def build(settings):
        built.append(settings)
        return make_small_model()

    monkeypatch.setattr(resolve, "forward_ms", lambda _: (pass_ms[built[-1].model_name], 1.0))
    settings = replace(parse_training(words), num_classes=3)
    found = resolve.choose_network(settings, find(settings), build, seconds)
    assert replace(settings, model_name=found.model_name, alpha=found.alpha, input_size=found.input_size) == found
    assert all(one.weights == "none" for one in built), "nothing is downloaded to be timed"
    return found.model_name, found.alpha, found.input_size


def keep_weights(size, tmp_path, monkeypatch):
    """A file of MobileNetV2's weights at an input size, as Keras keeps it."""
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "keras"))
    (tmp_path / "keras" / "models").mkdir(parents=True)
    name = f"mobilenet_v2_weights_tf_dim_ordering_tf_kernels_0.35_{size}_no_top.h5"
    (tmp_path / "keras" / "models" / name).touch()


@pytest.fixture
def downloaded(tmp_path, monkeypatch):
    """Weights of MobileNetV2 at 160 pixels."""
    keep_weights(160, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("seconds", "milliseconds", "network"),
    [  # of 21 images, whose first model may take a fifth of the time
        (inf, 1000.0, (BEST, 1.0, 160)),
        (21 * 5 * 2.25, 1000.0, (BEST, 1.0, 192)),  # 224 is more than the photos have
        (21 * 5 * 2.24, 1000.0, (BEST, 1.0, 160)),
        (21 * 5 * 1.0, 1000.0, (BEST, 1.0, 128)),
        (21 * 5 * 0.9, 1000.0, (SMALL, 0.35, 160)),  # of which there is that size alone
    ],
)
def test_the_best_network_is_chosen_that_there_is_time_for(
    seconds, milliseconds, network, photos, downloaded, monkeypatch
):
    pass_ms = {BEST: milliseconds, SMALL: 1.0}
    assert chosen([*photos, "--deadline", "9m"], seconds + 1e-6, monkeypatch, pass_ms) == network


def test_the_chosen_network_has_the_names_of_its_timing_table(photos, downloaded, monkeypatch):
    """Which profiler.py writes, in whose process no other network was made before."""

    def build(settings):
        return keras.Sequential([keras.Input((9, 9, 3)), keras.layers.Conv2D(2, 3), keras.layers.Flatten()])

    monkeypatch.setattr(resolve, "forward_ms", lambda _: (1.0, 1.0))
    keras.utils.clear_session()
    names = [variable.path for variable in build(None).trainable_variables]
    keras.utils.clear_session()
    settings = replace(parse_training(photos), num_classes=3)
    chosen = resolve.choose_network(settings, find(settings), build, inf)
    assert [variable.path for variable in build(chosen).trainable_variables] == names


def test_large_photos_are_seen_larger_than_imagenets(photos, tmp_path, monkeypatch):
    for index, path in enumerate(sorted(tmp_path.rglob("*.png"))):
        Image.new("RGB", (300, 400), (index, 0, 0)).save(path)
    words = [*photos, "--deadline", "9m"]
    assert chosen(words, 21 * 5 * 2.25**2 + 1e-6, monkeypatch, {BEST: 1000.0, SMALL: 1.0}) == (BEST, 1.0, 288)
    keep_weights(224, tmp_path, monkeypatch)
    assert chosen(words, 60, monkeypatch, {BEST: 1000.0, SMALL: 1.0}) == (SMALL, 0.35, 288), "Keras' file is of 224"


@pytest.mark.parametrize("answers", [True, False])
def test_weights_are_downloaded_only_where_time_asks_for_it_and_their_host_answers(
    answers, photos, tmp_path, monkeypatch
):
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "none"))
    asked = []

    def urlopen(request, timeout):
        asked.append(request.full_url)
        if not answers:
            raise URLError("no network")
        return nullcontext()

    monkeypatch.setattr(networks, "urlopen", urlopen)
    assert chosen([*photos, "--deadline", "9m"], 1e4, monkeypatch, {BEST: 1.0}) == (BEST, 1.0, 192) and not asked
    small = (SMALL, 0.35, 128) if answers else (BEST, 1.0, 128)
    assert chosen([*photos, "--deadline", "9m"], 0.0, monkeypatch, {BEST: 1.0, SMALL: 1.0}) == small
    assert asked[0].endswith("_0.35_128_no_top.h5")


def test_a_network_is_chosen_by_memory_too(photos, downloaded, monkeypatch):
    asked = []

    def needed_mb(self, mask, batch_size, micro_batch=None):
        asked.append((self.settings.model_name, batch_size, micro_batch))
        return 1e9 if self.settings.model_name == BEST else 1.0

    monkeypatch.setattr(TracedSteps, "certainly_fit", lambda *_: False)
    monkeypatch.setattr(TracedSteps, "needed_mb", needed_mb)
    assert chosen([*photos, "--memory", "9G"], inf, monkeypatch, {BEST: 1.0, SMALL: 1.0}) == (SMALL, 0.35, 160)
    assert asked[:2] == [(BEST, 50, 13), (BEST, 32, 8)], "at 160 and 128 pixels"


def test_what_is_given_decides_on_the_network(photos, tmp_path):
    def network_of(*more, words=photos):
        settings = parse_training([*words, *more])
        return settings.model_name, settings.alpha, settings.input_size

    assert network_of() == network_of("--weights", "imagenet") == (None, 1.0, None)
    assert network_of("--input_size", "96") == (None, 1.0, 96)
    assert network_of("--model_name", BEST) == (BEST, 1.0, 160)
    assert network_of("--model_name", SMALL, "--input_size", "96") == (SMALL, 0.35, 96)
    for more in (["--weights", "none"], ["--export", "board"], ["--weights", "LICENSE"]):
        assert network_of(*more) == (SMALL, 0.35, 160)
    assert network_of("--alpha", "0.5") == (SMALL, 0.5, 160)
    assert network_of("--preset", "photos", words=["--dataset_name", "digits"]) == (SMALL, 0.35, 160)
    before = tmp_path / "before"
    before.mkdir()
    write_record(before / CONFIG, replace(Settings(), model_name=BEST, input_size=192).to_record())
    assert network_of("--weights", str(before)) == (BEST, 1.0, 192)
    assert network_of("--weights", str(before), "--input_size", "96") == (BEST, 1.0, 96)
    assert Path(parse_training(photos).folder).name == "image_folder_elastic_training_upper_part"
    profiled = parse_profiler(photos)
    assert (profiled.model_name, profiled.input_size, profiled.weights) == (BEST, 160, "none")


def test_a_photos_smaller_side(tmp_path):
    Image.new("RGB", (30, 20)).save(tmp_path / "a.png")
    assert smaller_side(str(tmp_path / "a.png")) == smaller_side((tmp_path / "a.png").read_bytes()) == 20
    assert smaller_side(np.zeros((7, 9, 3), np.uint8)) == 7
    assert smaller_side(b"none") == smaller_side(str(tmp_path)) == 0


def test_the_command_says_what_it_chose(photos):
    done = command("main.py", *photos, "--plan")
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("--model_name is ")]
    assert line.startswith(f"--model_name is {BEST}, --input_size 160: 14 MB, ")
