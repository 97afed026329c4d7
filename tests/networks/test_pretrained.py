"""Weights that training starts from: files that fit load completely, all others are refused in one line."""

from dataclasses import replace
from pathlib import Path

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import HAS_VIT, with_vit
from pretrain_glyphs import draw_glyph, text_fonts

import models
from elastic_trainer.datasets.images import resized
from elastic_trainer.networks import pretrained
from elastic_trainer.networks.architectures import build_backbone
from elastic_trainer.networks.saved_model import save_model
from elastic_trainer.settings import Settings
from elastic_trainer.settings.network_names import GLYPH_HEAD, GLYPH_WEIGHTS
from elastic_trainer.system.errors import UserError
from elastic_trainer.system.files import write_record

pytestmark = pytest.mark.usefixtures("small_vit")

# {label: alpha}. "mobilenetv2 wide" differs from "mobilenetv2" only in its shapes.
BACKBONES = {"vgg16": 1.0, "mobilenetv2": 0.35, "mobilenetv2 wide": 0.5, "vit": 1.0}


@pytest.fixture(scope="module")
def backbones(small_vit):
    """{label: backbone}."""
    labels = [label for label in BACKBONES if HAS_VIT or label != "vit"]
    return {label: build_backbone(label.split()[0], 32, "none", BACKBONES[label]) for label in labels}


@pytest.fixture(scope="module")
def files(backbones, tmp_path_factory):
    """Weights of every backbone in both of Keras' layouts: {(label, ending): path}."""
    folder = tmp_path_factory.mktemp("weights")
    paths = {}
    for label, backbone in backbones.items():
        for ending in (".weights.h5", ".h5"):
            paths[label, ending] = folder / f"{label.replace(' ', '_')}{ending}"
            if ending == ".h5":
                save_legacy(backbone, paths[label, ending])
            else:
                backbone.save_weights(paths[label, ending])
    return paths


def save_legacy(backbone, path):
    """Save the weights in the older layout of Keras, in which keras.applications downloads them."""
    from keras.src.legacy.saving import legacy_h5_format

    with h5py.File(path, "w") as file:
        legacy_h5_format.save_weights_to_hdf5_group(file, backbone)


def test_the_committed_weights_are_small_and_read_printed_digits():
    assert GLYPH_WEIGHTS.stat().st_size < 3e6
    model, rng = models.build_model("mobilenetv2", 64, 10, str(GLYPH_WEIGHTS), alpha=0.35), np.random.default_rng(0)
    with np.load(GLYPH_HEAD) as head:
        model.get_layer("head").set_weights([head["kernel"], head["bias"]])
    labels, fonts = np.arange(100) % 10, text_fonts()
    drawn = [draw_glyph(f"{label}", fonts[rng.integers(len(fonts))], rng) for label in labels]
    images = np.stack([resized(np.repeat(pixels[..., None], 3, axis=-1), 64) for pixels in drawn])
    assert np.mean(model.predict(images, verbose=0).argmax(axis=1) == labels) > 0.95


@pytest.mark.parametrize("label", with_vit(BACKBONES))
@pytest.mark.parametrize("ending", [".weights.h5", ".h5"])
def test_weights_of_each_network_load_into_it_and_into_no_other(label, ending, files, backbones):
    name, backbone = label.split()[0], backbones[label]
    for (of, kind), path in files.items():
        if kind != ending:
            continue
        if of == label:
            for weight in backbone.weights:
                weight.assign(tf.fill(weight.shape, 7.0))
            pretrained.load(backbone, backbone, path, name)
            assert not any((weight.numpy() == 7.0).all() for weight in backbone.weights), "every weight is loaded"
        else:
            with pytest.raises(UserError, match=f"--weights .* does not fit {name} without its top layers: ..."):
                pretrained.load(backbone, backbone, path, name)


@pytest.mark.parametrize("ending", [".weights.h5", ".h5"])
def test_files_without_weights_and_damaged_files_are_refused(ending, tmp_path, files, backbones):
    def refusal(path):
        with pytest.raises(UserError) as caught:
            pretrained.load(backbones["mobilenetv2"], backbones["mobilenetv2"], path, "mobilenetv2")
        assert "\n" not in str(caught.value)
        return str(caught.value)

    complete = files["mobilenetv2", ending].read_bytes()
    path = tmp_path / f"some{ending}"
    for content in (b"no weights", b"", complete[: len(complete) // 2]):
        path.write_bytes(content)
        assert "is damaged or does not fit mobilenetv2" in refusal(path)
    h5py.File(path, "w").close()
    assert "does not fit mobilenetv2" in refusal(path)
    path = tmp_path / f"other{ending}"  # another path: Keras keeps a file open after it failed to load it
    path.write_bytes(complete)
    with h5py.File(path, "r+") as file:
        arrays = []
        file.visititems(lambda _, item: arrays.append(item) if isinstance(item, h5py.Dataset) else None)
        arrays[5][...] = np.nan
    assert "contains weights that are not finite, such as" in refusal(path)
    path.unlink()
    path.mkdir()
    assert "has no best.keras; a run saves it with --save_model" in refusal(path)


@pytest.mark.parametrize("name", with_vit(["mobilenetv2", "vit"]))
def test_a_failing_download_of_imagenet_weights_says_what_to_do(name, monkeypatch):
    def no_network(*_, **__):
        raise Exception(
            "URL fetch failure on https://weights.example/some_no_top.h5: None -- [Errno -2] Name not known"
        )

    monkeypatch.setattr("keras.src.utils.file_utils.get_file", no_network)  # what keras.applications calls
    monkeypatch.setattr(keras.utils, "get_file", no_network)  # what vit-keras calls
    with pytest.raises(
        UserError,
        match=r"--weights imagenet: .* https://weights.example/some_no_top.h5: .*fetch the file .* --weights FILE",
    ):
        models.build_model(name, 64, 10, "imagenet")


def differ(model, other):
    return [
        name
        for name, one, two in zip(
            [weight.path for weight in model.weights], model.get_weights(), other.get_weights(), strict=True
        )
        if not np.array_equal(one, two)
    ]


@pytest.mark.parametrize("name", with_vit(["mobilenetv2", "vit"]))
def test_a_saved_model_supplies_its_head_only_for_the_same_number_of_classes(name, tmp_path, capsys):
    saved = models.build_model(name, 32, 5, alpha=0.35)
    run = tmp_path / "run"
    run.mkdir()
    save_model(saved, run / "best.keras")
    assert not differ(models.build_model(name, 32, 5, str(run), alpha=0.35), saved)
    assert not capsys.readouterr().out
    other = models.build_model(name, 32, 7, str(run / "best.keras"), alpha=0.35)
    assert "its head is kept for 0 of 7 classes (none)" in capsys.readouterr().out
    backbones = [next(one for one in model.layers if isinstance(one, keras.Model)) for model in (other, saved)]
    assert not differ(*backbones)
    with pytest.raises(UserError, match=r"--weights .*best\.keras: does not fit mobilenetv2: "):
        models.build_model("mobilenetv2", 32, 5, str(run), alpha=0.5)


def test_a_keras_application_with_top_layers_supplies_its_backbone(tmp_path, capsys):
    complete = keras.applications.MobileNetV2(input_shape=(32, 32, 3), alpha=0.35, weights=None, classes=9)
    complete.save(tmp_path / "whole.keras")
    model = models.build_model("mobilenetv2", 32, 5, str(tmp_path / "whole.keras"), alpha=0.35)
    np.testing.assert_array_equal(model.get_weights()[0], complete.get_weights()[0])
    assert "its head is kept for 0 of 5 classes" in capsys.readouterr().out


class Unknown(keras.layers.Layer):
    """A layer that Keras cannot load."""

    def call(self, inputs):
        return inputs


def small(shape, classes, depth=1, last=keras.layers.Identity):
    """A custom network with `depth` equal convolutions."""
    inputs = keras.Input(shape)
    x = keras.layers.Conv2D(4, 3, name="first")(inputs)
    for _ in range(depth):
        x = keras.layers.Conv2D(4, 3, padding="same")(x)
    return keras.Model(inputs, keras.layers.Dense(classes)(last()(keras.layers.GlobalAveragePooling2D()(x))))


def custom(shape, classes, depth=1):
    return small(shape, classes, depth, Unknown)


@pytest.mark.parametrize("function", [small, custom])
@pytest.mark.parametrize("ending", [".keras", ".weights.h5"])
def test_weights_of_a_deeper_custom_network_are_refused(ending, function, tmp_path):
    """Keras itself loads what fits and ignores the others."""
    name = f"{__file__}:{function.__name__}"
    for depth, message in ((2, f"does not fit {name}: "), (1, None)):
        file = tmp_path / f"{depth}{ending}"
        saved = keras.Model(image := keras.Input((12, 12, 3)), function((12, 12, 3), 3, depth)(image))
        if ending == ".keras":
            save_model(saved, file)
        else:
            saved.layers[-1].save_weights(file)
        if message is None:
            assert not differ(models.build_model(name, 12, 3, str(file)), saved)
        else:
            with pytest.raises(UserError, match=message):
                models.build_model(name, 12, 3, str(file))


CASES = {
    "cab": "its head is kept for 3 of 3 classes (c, a, b)",
    "abx": "its head is kept for 2 of 3 classes (a, b)",
    "xb": "its head is kept for 1 of 2 classes (b)",
    "xyz": "its head is kept for 0 of 3 classes (none)",
    "abc": "its head is kept for 3 of 3 classes (a, b, c)",
}


@pytest.mark.parametrize(("function", "cases"), [("branches", [*CASES]), ("custom_layer", ["abx"])])
def test_the_head_of_a_run_is_kept_for_classes_of_the_same_name(function, cases, tmp_path, capsys):
    network = Settings(f"{Path(__file__).parents[1]}/zoo.py:{function}", 12, weights="none", seed=1)
    saved = models.build(replace(network, num_classes=3))
    saved.weights[-1].assign([5.0, 6.0, 7.0])
    save_model(saved, tmp_path / "best.keras")
    record = {"class_names": ["a", "b", "c"], "training_images": "", "test_images": ""}
    write_record(tmp_path / "config.json", {"images": record})
    fresh = {count: models.build(replace(network, seed=2, num_classes=count)) for count in {*map(len, cases)}}
    for now, weights in zip(cases, (tmp_path, *[tmp_path / "best.keras"] * 4), strict=False):
        model = models.build(replace(network, seed=2, weights=str(weights), num_classes=len(now)), now)
        [line] = capsys.readouterr().out.splitlines()
        assert line.startswith(f"--weights {tmp_path / 'best.keras'}: ") and line.endswith(CASES[now])
        heads = (network.weights[-2:] for network in (model, fresh[len(now)], saved))
        for variable, new, old in zip(*heads, strict=True):
            for place, name in enumerate(now):
                expected = old[..., "abc".index(name)] if name in "abc" else new[..., place]
                np.testing.assert_array_equal(variable[..., place], expected)
        for variable, old in zip(model.weights[:-2], saved.weights[:-2], strict=True):
            np.testing.assert_array_equal(variable, old)
