"""Networks: frozen batch-norm statistics, weights from files, clear refusals."""

import sys
from argparse import Namespace
from pathlib import Path

import benchmark_rho
import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

import models
from elastic_trainer.cli.commands import parse_profiler
from elastic_trainer.networks import pretrained
from elastic_trainer.networks.architectures import architecture
from elastic_trainer.networks.batch_norm import FrozenBatchNormalization, freeze_batch_norm_statistics
from elastic_trainer.networks.memory import check_memory, memory_needed_mb
from elastic_trainer.networks.names import GLYPH_WEIGHTS, KERAS_NETWORKS, MODEL_NAMES
from elastic_trainer.networks.saved_model import save_model
from elastic_trainer.networks.tensors import head_mask, normalisation_and_bias_mask, tensor_names
from elastic_trainer.settings import TRAIN_TYPES
from elastic_trainer.training.optimizers import make_optimizer
from elastic_trainer.training.step import TrainStep
from utils import UserError

SHARED_WEIGHTS = (
    Path(__file__).resolve().parents[3]
    / "shared"
    / "weights"
    / "mobilenet_v2_weights_tf_dim_ordering_tf_kernels_0.35_224_no_top.h5"
)


def plain_backbone(name):
    """The Keras network with moving statistics as far from their start as training would take them."""
    kinds = {"mobilenetv2": keras.applications.MobileNetV2, "resnet50": keras.applications.ResNet50}
    extra = {"alpha": 0.35} if name == "mobilenetv2" else {}
    backbone = kinds[name](input_shape=(32, 32, 3), include_top=False, weights=None, **extra)
    rng = np.random.default_rng(0)
    for variable in backbone.variables:
        if variable.name == "moving_mean":
            variable.assign(rng.normal(0, 0.1, variable.shape))
        if variable.name == "moving_variance":
            variable.assign(rng.uniform(0.5, 1.5, variable.shape))
    return backbone


def statistics_of(model):
    return [v.numpy() for v in model.variables if v.name in ("moving_mean", "moving_variance")]


@pytest.mark.parametrize("name", ["mobilenetv2", "resnet50"])
def test_frozen_network_equals_the_plain_one_in_inference_even_when_called_for_training(name):
    plain = plain_backbone(name)
    frozen = keras.models.clone_model(plain)
    frozen.set_weights(plain.get_weights())
    freeze_batch_norm_statistics(frozen)
    images = tf.random.uniform((2, 32, 32, 3), -1, 1, seed=0)
    expected = plain(images, training=False).numpy()
    scale = np.abs(expected).max()
    for training in (False, True):
        inner = frozen(images, training=training).numpy()
        outer = keras.Sequential([frozen])(images, training=training).numpy()
        np.testing.assert_allclose(inner, expected, atol=1e-4 * scale)
        np.testing.assert_allclose(outer, expected, atol=1e-4 * scale)
    assert np.abs(plain(images, training=True).numpy() - expected).max() > 1e-2 * scale


@pytest.mark.parametrize("name", ["mobilenetv2", "resnet50"])
def test_batch_norm_statistics_never_move(name):
    model = models.build_model(name, 32, 10, alpha=0.35)
    before = statistics_of(model)
    assert len(before) > 50
    images, labels = tf.random.uniform((4, 32, 32, 3), 0, 255, seed=0), tf.constant([0, 1, 2, 3])
    model(images, training=True)
    keras.Sequential([model])(images, training=True)
    optimizer = make_optimizer("sgd", 1e-2, 5e-4, 10)
    optimizer.build(model.trainable_variables)
    step = TrainStep(model, optimizer, 4)
    for _ in range(3):
        step(images, labels)
    for old, new in zip(before, statistics_of(model), strict=True):
        np.testing.assert_array_equal(old, new)


def test_frozen_batch_norm_trains_gamma_and_beta_as_the_plain_one_does_in_inference():
    x = tf.random.normal((2, 4, 4, 3), seed=0)
    plain = keras.layers.BatchNormalization()
    plain.build(x.shape)
    plain.moving_mean.assign([0.1, 0.2, 0.3])
    plain.moving_variance.assign([0.5, 1.0, 2.0])
    for other in ({}, {"scale": False}, {"center": False}):
        reference = keras.layers.BatchNormalization(**other)
        frozen = FrozenBatchNormalization(**other)
        gradients = []
        for layer, training in ((reference, False), (frozen, True)):
            layer.build(x.shape)
            layer.moving_mean.assign(plain.moving_mean)
            layer.moving_variance.assign(plain.moving_variance)
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(tf.sin(layer(x, training=training)))
            gradients.append(tape.gradient(loss, [x, *(v.value for v in layer.trainable_variables)]))
        for expected, got in zip(*gradients, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_a_benchmarks_random_network_gets_batch_norms_that_normalise_and_stay_frozen():
    images = np.random.default_rng(0).uniform(-1, 1, (16, 32, 32, 3)).astype(np.float32)
    model = freeze_batch_norm_statistics(
        keras.applications.MobileNetV2(input_shape=(32, 32, 3), include_top=False, weights=None, alpha=0.35)
    )
    layers = [layer for layer in model.layers if isinstance(layer, FrozenBatchNormalization)]
    momenta = [layer.momentum for layer in layers]
    benchmark_rho.standardize(model, images)
    assert all(type(layer) is FrozenBatchNormalization for layer in layers)
    assert [layer.momentum for layer in layers] == momenta
    statistics = [variable.numpy() for variable in model.non_trainable_variables]
    outputs = keras.Model(model.input, [layer.output for layer in layers])(images, training=True)
    for output in outputs:
        np.testing.assert_allclose(np.mean(output, axis=(0, 1, 2)), 0, atol=0.02)
    # Of the first: the last ones have one pixel an image, where Keras' unbiased variance is a fifteenth larger.
    np.testing.assert_allclose(np.var(outputs[0], axis=(0, 1, 2)), 1, atol=0.02)
    for before, variable in zip(statistics, model.non_trainable_variables, strict=True):
        np.testing.assert_array_equal(before, variable.numpy())


def test_frozen_batch_norm_takes_other_shapes():
    layer = FrozenBatchNormalization()
    x = tf.random.normal((5, 3), mean=4.0, seed=0)
    np.testing.assert_allclose(layer(x, training=True), x / np.sqrt(1 + layer.epsilon), rtol=1e-5)


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_every_network_has_its_parts_and_survives_saving(name, tmp_path):
    model = models.build_model(name, 32, 7, alpha=0.35, augment="flip_rotate")
    kinds = [type(layer) for layer in model.layers]
    for kind in (keras.layers.RandomFlip, keras.layers.RandomRotation, keras.layers.Rescaling, keras.layers.Dropout):
        assert kind in kinds
    assert model.get_layer("dropout").rate == 0.2
    images = tf.random.uniform((2, 32, 32, 3), 0, 255, seed=0)
    logits = model(images, training=False).numpy()
    assert logits.shape == (2, 7)
    names = tensor_names(model)
    assert len(set(names)) == len(names) == len(model.trainable_variables)
    head = head_mask(model)
    assert [names[k] for k in np.flatnonzero(head)] == ["head/kernel", "head/bias"]
    model.save(tmp_path / "model.keras")
    copy = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(copy(images, training=False), logits, rtol=1e-4, atol=1e-5)


def test_normalisation_and_bias_mask():
    model = models.build_model("mobilenetv2", 32, 5, alpha=0.35)
    mask = normalisation_and_bias_mask(model)
    for name, trains in zip(tensor_names(model), mask, strict=True):
        assert trains == (name.endswith(("/gamma", "/beta", "/bias")) or name.startswith("head/"))


def test_the_committed_weights_load_and_are_small():
    assert GLYPH_WEIGHTS.stat().st_size < 3e6
    model = models.build_model("mobilenetv2", 64, 10, str(GLYPH_WEIGHTS), alpha=0.35)
    other = models.build_model("mobilenetv2", 64, 10, "none", alpha=0.35)
    assert not np.allclose(model.get_weights()[0], other.get_weights()[0])


def test_imagenet_weights_in_keras_own_layout_load():
    if not SHARED_WEIGHTS.is_file():
        pytest.skip("../shared/weights is not here")
    model = models.build_model("mobilenetv2", 64, 10, str(SHARED_WEIGHTS), alpha=0.35)
    variance = next(v for v in model.variables if v.name == "moving_variance")
    assert not np.allclose(variance.numpy(), 1.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mobilenetv2", 64, 10, "no/such.h5"), "no such file"),
        (("mobilenetv2", 64, 10, __file__), r"must be one of \.h5"),
        (("mobilenetv2", 64, 10, str(GLYPH_WEIGHTS), 1.0), "does not fit mobilenetv2"),
        (("resnet50", 64, 10, str(GLYPH_WEIGHTS)), "does not fit resnet50"),
        (("vit", 40, 10), "multiple of 16"),
        (("vgg16", 16, 10), "at least 32"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        models.build_model(*arguments)


# Backbones at the smallest size; widths in which two shapes of MobileNetV2 are told apart.
BACKBONES = {"resnet50": 1.0, "vgg16": 1.0, "mobilenetv2": 0.35, "mobilenetv2 wide": 0.5, "vit": 1.0}


@pytest.fixture(scope="module")
def backbones():
    """{label: backbone}."""
    return {label: architecture(label.split()[0]).build(32, alpha, None) for label, alpha in BACKBONES.items()}


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
    """Weights alone in the layout of older Keras files, as keras.applications downloads them."""
    from keras.src.legacy.saving import legacy_h5_format

    with h5py.File(path, "w") as file:
        legacy_h5_format.save_weights_to_hdf5_group(file, backbone)


@pytest.mark.parametrize("label", BACKBONES)
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
            assert not any((weight.numpy() == 7.0).all() for weight in backbone.weights), "each is loaded"
        else:
            with pytest.raises(UserError, match=f"--weights .*: does not fit {name} without its top layers: ..."):
                pretrained.load(backbone, backbone, path, name)


def test_weights_of_a_deeper_network_do_not_fit_though_every_layer_finds_its_own(tmp_path):
    """Keras itself loads such a file without a word."""
    vgg16 = keras.applications.VGG16(input_shape=(32, 32, 3), include_top=False, weights=None)
    deeper = keras.Model(vgg16.inputs, keras.layers.Conv2D(3, 1)(vgg16.output))
    deeper.save_weights(tmp_path / "deeper.weights.h5")
    with pytest.raises(UserError, match=r"does not fit vgg16 .*: it holds 28 arrays, the network has 26"):
        models.build_model("vgg16", 32, 10, str(tmp_path / "deeper.weights.h5"))


@pytest.mark.parametrize("ending", [".weights.h5", ".h5"])
def test_files_that_hold_no_weights_or_damaged_ones_are_refused(ending, tmp_path, files, backbones):
    def refusal(path):
        with pytest.raises(UserError) as caught:
            pretrained.load(backbones["mobilenetv2"], backbones["mobilenetv2"], path, "mobilenetv2")
        assert "\n" not in str(caught.value)
        return str(caught.value)

    whole = files["mobilenetv2", ending].read_bytes()
    path = tmp_path / f"some{ending}"
    path.write_text("no weights")
    assert "is no HDF5 file, or a damaged one" in refusal(path)
    path.write_bytes(b"")
    assert "is no HDF5 file, or a damaged one" in refusal(path)
    path.write_bytes(whole[: len(whole) // 2])
    assert "is no HDF5 file, or a damaged one" in refusal(path)
    h5py.File(path, "w").close()
    assert "does not fit mobilenetv2" in refusal(path)
    path = tmp_path / f"other{ending}"  # Keras keeps a file open that it could not load
    path.write_bytes(whole)
    with h5py.File(path, "r+") as file:
        arrays = []
        file.visititems(lambda _, item: arrays.append(item) if isinstance(item, h5py.Dataset) else None)
        arrays[5][...] = np.nan
    assert "holds weights that are no finite numbers; the file is damaged" in refusal(path)
    path.unlink()
    path.mkdir()
    assert "holds no best.keras; a run keeps it with --save_model" in refusal(path)


@pytest.mark.parametrize("name", ["mobilenetv2", "vit"])
def test_a_failing_download_of_imagenet_weights_says_what_to_do(name, monkeypatch):
    def no_network(*_, **__):
        raise Exception(
            "URL fetch failure on https://weights.example/some_no_top.h5: None -- [Errno -2] Name not known"
        )

    monkeypatch.setattr("keras.src.utils.file_utils.get_file", no_network)  # what keras.applications calls
    monkeypatch.setattr(keras.utils, "get_file", no_network)  # what vit-keras calls
    with pytest.raises(
        UserError,
        match=r"--weights imagenet: the weights of .* cannot be downloaded; .*fetch "
        r"https://weights.example/some_no_top.h5 where there is one and give --weights FILE",
    ):
        models.build_model(name, 64, 10, "imagenet")


def test_a_width_without_imagenet_weights_is_refused():
    with pytest.raises(UserError, match=r"--weights imagenet: mobilenetv2 at --alpha 0.4: "):
        models.build_model("mobilenetv2", 64, 10, "imagenet", alpha=0.4)


# --- keras.applications -----------------------------------------------------------------------------------------------


def test_the_names_are_those_of_keras_applications():
    offered = {name for name in vars(keras.applications) if name[0].isupper()}
    assert set(KERAS_NETWORKS) == offered
    parsed = parse_profiler(["--model_name", "EfficientNetB0", "--weights", "none"])
    assert parsed.model_name == "efficientnetb0"
    with pytest.raises(UserError, match=r"--model_name: .*did you mean 'efficientnetb0'"):
        parse_profiler(["--model_name", "eficientnetb0"])


MODULES = sorted({getattr(keras.applications, name).__module__: name for name in KERAS_NETWORKS}.values())


@pytest.mark.parametrize("keras_name", MODULES)
def test_preprocessing_is_that_of_keras_applications(keras_name):
    images = np.random.default_rng(0).uniform(0, 255, (2, 5, 5, 3)).astype(np.float32)
    module = sys.modules[getattr(keras.applications, keras_name).__module__]
    inputs = keras.Input((5, 5, 3))
    ours = keras.Model(inputs, keras.layers.Identity()(architecture(keras_name.lower()).preprocess(inputs)))
    np.testing.assert_allclose(ours(images), module.preprocess_input(images.copy()), rtol=1e-5, atol=1e-4)
    assert keras.config.floatx() == "float32"


def test_preprocessing_of_vit_is_that_of_vit_keras():
    from vit_keras import vit

    images = np.random.default_rng(0).uniform(0, 255, (2, 5, 5, 3)).astype(np.float32)
    ours = architecture("vit").preprocess(images)
    np.testing.assert_allclose(ours, vit.preprocess_inputs(images.copy()), atol=1e-5)


@pytest.mark.parametrize("name", ["resnet50", "mobilenetv2", "efficientnetb0", "densenet121"])
def test_logits_are_those_of_the_plain_keras_network(name):
    """The same weights in a network that only Keras' own functions make, on raw images."""
    model = models.build_model(name, 32, 5, augment="none")
    function = getattr(keras.applications, next(one for one in KERAS_NETWORKS if one.lower() == name))
    plain = function(input_shape=(32, 32, 3), include_top=False, weights=None, pooling="avg")
    backbone = next(layer for layer in model.layers if isinstance(layer, keras.Model))
    rng = np.random.default_rng(0)
    for variable in backbone.variables:
        if variable.name == "moving_variance":
            variable.assign(rng.uniform(0.5, 1.5, variable.shape))
    plain.set_weights(backbone.get_weights())
    images = rng.uniform(0, 255, (2, 32, 32, 3)).astype(np.float32)
    features = plain(sys.modules[function.__module__].preprocess_input(images.copy()), training=False)
    expected = model.get_layer("head")(features).numpy()
    np.testing.assert_allclose(model(images, training=False), expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("name", ["efficientnetb0", "convnexttiny", "mobilenetv3small"])
def test_other_networks_train_keep_their_statistics_and_survive_saving(name, tmp_path):
    model = models.build_model(name, 32, 5, augment="none")
    before = [v.numpy() for v in model.non_trainable_variables if "seed" not in v.path]
    optimizer = make_optimizer("sgd", 1e-2, 5e-4, 10)
    optimizer.build(model.trainable_variables)
    head = head_mask(model)
    assert [one for one, taken in zip(tensor_names(model), head, strict=True) if taken] == [
        "head/kernel",
        "head/bias",
    ]
    images = tf.random.uniform((2, 32, 32, 3), 0, 255, seed=0)
    step = TrainStep(model, optimizer, 2)
    assert np.isfinite(float(step(images, tf.constant([0, 1]))[0]))
    after = [v.numpy() for v in model.non_trainable_variables if "seed" not in v.path]
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)
    save_model(model, tmp_path / "model.keras")
    copy = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(copy(images, training=False), model(images, training=False), rtol=1e-3, atol=1e-4)


def test_a_size_that_keras_refuses_is_refused_in_one_line():
    with pytest.raises(UserError, match=r"--input_size 64: xception cannot be built so: .*71"):
        models.build_model("xception", 64, 10)


# --- weights of earlier runs and of vit-keras -------------------------------------------------------------------------


def differ(model, other):
    return [
        name
        for name, one, two in zip(
            [weight.path for weight in model.weights], model.get_weights(), other.get_weights(), strict=True
        )
        if not np.array_equal(one, two)
    ]


@pytest.mark.parametrize("name", ["resnet50", "vgg16", "mobilenetv2", "vit"])
def test_a_saved_model_gives_its_weights_and_its_head_where_the_classes_agree(name, tmp_path, capsys):
    saved = models.build_model(name, 32, 5, alpha=0.35)
    run = tmp_path / "run"
    run.mkdir()
    save_model(saved, run / "best.keras")
    for path in (run, run / "best.keras"):
        assert not differ(models.build_model(name, 32, 5, str(path), alpha=0.35), saved)
        assert not capsys.readouterr().out
    other = models.build_model(name, 32, 7, str(run), alpha=0.35)
    assert "its head for 5 outputs is not taken; a new one is for 7 classes" in capsys.readouterr().out
    backbones = [next(one for one in model.layers if isinstance(one, keras.Model)) for model in (other, saved)]
    assert not differ(*backbones)
    wrong = "vgg16" if name != "vgg16" else "mobilenetv2"
    with pytest.raises(UserError, match=f"--weights .*best.keras: does not fit {wrong}: "):
        models.build_model(wrong, 32, 5, str(run), alpha=0.5)


def test_a_keras_application_saved_with_its_top_gives_its_backbone(tmp_path, capsys):
    whole = keras.applications.MobileNetV2(input_shape=(32, 32, 3), alpha=0.35, weights=None, classes=9)
    whole.save(tmp_path / "whole.keras")
    model = models.build_model("mobilenetv2", 32, 5, str(tmp_path / "whole.keras"), alpha=0.35)
    np.testing.assert_array_equal(model.get_weights()[0], whole.get_weights()[0])
    assert "its head for 9 outputs is not taken" in capsys.readouterr().out


def test_own_networks_with_layers_of_their_own_go_on_from_a_run(tmp_path):
    zoo = f"{Path(__file__).parents[1]}/zoo.py:custom_layer"
    saved = models.build_model(zoo, 12, 3)
    save_model(saved, tmp_path / "best.keras")
    keras.utils.set_random_seed(5)
    assert not differ(models.build_model(zoo, 12, 3, str(tmp_path)), saved)
    with pytest.raises(UserError, match=r"--weights .*best.keras: does not fit .*custom_layer: "):
        models.build_model(zoo, 12, 4, str(tmp_path))


def as_numpy_file(path, grid):
    """Weights of ViT under the names that vit-keras' files have, with a position table of `grid` × `grid`."""
    rng = np.random.default_rng(0)
    arrays = {}

    def add(name, shape):
        arrays[name] = rng.normal(0, 0.02, shape).astype(np.float32)

    add("embedding/kernel", (16, 16, 3, 768))
    add("embedding/bias", (768,))
    add("cls", (1, 1, 768))
    add("Transformer/posembed_input/pos_embedding", (1, 1 + grid * grid, 768))
    add("head/kernel", (768, 1000))
    add("head/bias", (1000,))
    for kind in ("scale", "bias"):
        add(f"Transformer/encoder_norm/{kind}", (768,))
    for k in range(12):
        block = f"Transformer/encoderblock_{k}"
        for norm in ("LayerNorm_0", "LayerNorm_2"):
            for kind in ("scale", "bias"):
                add(f"{block}/{norm}/{kind}", (768,))
        for dense, shape in (("Dense_0", (768, 3072)), ("Dense_1", (3072, 768))):
            add(f"{block}/MlpBlock_3/{dense}/kernel", shape)
            add(f"{block}/MlpBlock_3/{dense}/bias", shape[1:])
        for part in ("query", "key", "value"):
            add(f"{block}/MultiHeadDotProductAttention_1/{part}/kernel", (768, 12, 64))
            add(f"{block}/MultiHeadDotProductAttention_1/{part}/bias", (12, 64))
        add(f"{block}/MultiHeadDotProductAttention_1/out/kernel", (12, 64, 768))
        add(f"{block}/MultiHeadDotProductAttention_1/out/bias", (768,))
    np.savez(path, **arrays)
    return arrays


def test_vit_takes_files_of_vit_keras_and_interpolates_the_position_table(tmp_path, capsys):
    path = tmp_path / "vit.npz"
    arrays = as_numpy_file(path, grid=3)
    same, larger = (models.build_model("vit", size, 5, str(path)) for size in (48, 96))
    assert "position table interpolated to 6×6 patches" in capsys.readouterr().out
    tables = []
    for model in (same, larger):
        backbone = next(one for one in model.layers if isinstance(one, keras.Model))
        np.testing.assert_array_equal(backbone.get_layer("embedding").get_weights()[0], arrays["embedding/kernel"])
        tables.append(backbone.get_layer("Transformer_posembed_input").get_weights()[0])
        assert not any((weight == 0).all() for weight in backbone.get_weights())
    np.testing.assert_array_equal(tables[0], arrays["Transformer/posembed_input/pos_embedding"])
    given, grid = tables[0][0, 1:].reshape(3, 3, -1), tables[1][0, 1:].reshape(6, 6, -1)
    np.testing.assert_array_equal(tables[1][0, 0], tables[0][0, 0])
    for corner in ((0, 0), (0, -1), (-1, 0), (-1, -1)):
        np.testing.assert_allclose(grid[corner], given[corner], atol=1e-6)
    with pytest.raises(UserError, match=r"--weights .*vit.npz: an .npz file is for vit; resnet50 takes"):
        models.build_model("resnet50", 32, 5, str(path))
    del arrays["Transformer/encoderblock_3/LayerNorm_0/bias"]
    np.savez(path, **arrays)
    with pytest.raises(
        UserError, match=r"--weights .*vit.npz: is damaged or does not fit ViT-B/16: has no '.*_3/Layer"
    ):
        models.build_model("vit", 48, 5, str(path))
    path.write_bytes(b"no archive")
    with pytest.raises(UserError, match=r"--weights .*vit.npz: is damaged or does not fit ViT-B/16: "):
        models.build_model("vit", 48, 5, str(path))


# --- memory -----------------------------------------------------------------------------------------------------------


def everything(model):
    return np.ones(len(model.trainable_variables), bool)


def test_the_memory_needed_counts_what_is_surely_there():
    """A chain counted by hand: images, two convolutions, batch norm, pooling, dense; sizes in floats of 4 bytes."""
    inputs = keras.Input((8, 8, 3))
    scaled = keras.layers.Rescaling(1 / 255)(inputs)
    one = keras.layers.Conv2D(16, 3, padding="same", use_bias=False)(scaled)
    normal = keras.layers.BatchNormalization()(one)
    two = keras.layers.Conv2D(4, 1)(keras.layers.ReLU()(normal))
    flat = keras.layers.Flatten()(two)
    side = keras.layers.Dense(2)(keras.layers.Reshape((256,))(two))  # the same memory as flat
    model = keras.Model(inputs, keras.layers.Add()([keras.layers.Dense(2)(flat), side]))
    batch, weights = 5, 27 * 16 + 32 + 16 * 4 + 4 + 2 * (256 * 2 + 2)
    image, wide, narrow = 8 * 8 * 3, 8 * 8 * 16, 8 * 8 * 4
    kept = batch * (image + wide + wide + narrow)  # inputs of: conv, batch norm, conv, both dense
    mb = 4 / 1e6
    assert memory_needed_mb(model, batch, 1, everything(model)) == pytest.approx(mb * (batch * image + weights + kept))
    importance = memory_needed_mb(model, batch, 2, everything(model), measures_importance=True)
    assert importance == pytest.approx(mb * (batch * image + 5 * weights + kept))
    head = memory_needed_mb(model, batch, 1, head_mask(model))
    assert head == pytest.approx(mb * (batch * image + weights + batch * (wide + narrow)))  # the largest layer at work


def test_the_memory_needed_is_found_within_nested_models_once():
    backbone = keras.applications.MobileNetV2(input_shape=(32, 32, 3), alpha=0.35, include_top=False, weights=None)
    alone = keras.Model(backbone.inputs, keras.layers.Flatten()(backbone.output))
    inputs = keras.Input((32, 32, 3))
    nested = keras.Model(inputs, keras.layers.Flatten()(keras.Sequential([backbone])(inputs)))
    needed = [memory_needed_mb(model, 64, 1, everything(model)) for model in (alone, nested)]
    assert needed[0] == pytest.approx(needed[1])
    assert needed[0] > 20


def test_what_a_nested_model_is_given_is_not_counted_twice():
    given = keras.Input((8, 8, 3))
    inner = keras.Model(given, keras.layers.Conv2D(3, 1)(given))
    inputs = keras.Input((8, 8, 3))
    scaled = keras.layers.Rescaling(1 / 255)(inputs)
    both = keras.layers.Add()([inner(scaled), keras.layers.Conv2D(3, 1)(scaled)])
    model = keras.Model(inputs, keras.layers.Conv2D(3, 1)(keras.layers.Conv2D(3, 1)(both)))
    images, weights = 4, 4 * 12  # the batch, what is scaled, the sum, what the third convolution returns; momentum
    needed = memory_needed_mb(model, 1000, 1, everything(model))
    assert needed == pytest.approx(4 * (1000 * images * 8 * 8 * 3 + weights) / 1e6)


def options_for(**changed):
    given = {"model_name": "mobilenetv2", "input_size": 32, "batch_size": 4, "optimizer": "sgd"}
    return Namespace(**{**given, "train_type": "elastic_training", **changed})


def test_too_little_memory_is_refused_before_training(monkeypatch):
    model = models.build_model("mobilenetv2", 32, 10, alpha=0.35)
    count = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    monkeypatch.setattr(models, "available_memory_mb", lambda: 5 * count * 4 / 1e6)
    check_memory(model, options_for())
    with pytest.raises(
        UserError,
        match=r"--batch_size 4096: training mobilenetv2 .* takes at least [\d,]+ MB more, and \d+ MB are avail",
    ):
        check_memory(model, options_for(batch_size=4096))
    monkeypatch.setattr(models, "available_memory_mb", lambda: 2.5 * count * 4 / 1e6)
    check_memory(model, options_for(train_type="full_training"))
    for more in ({}, {"optimizer": "adam"}):  # copies while importance is measured
        with pytest.raises(UserError, match="--batch_size 4: "):
            check_memory(model, options_for(**more))
    monkeypatch.setattr(models, "available_memory_mb", lambda: 50.0)  # the head's gradient needs no layer but its own
    check_memory(model, options_for(batch_size=256, train_type="traditional_tl_training"))
    for scheme in ("full_training", "bn_plus_bias_training"):
        with pytest.raises(UserError, match="--batch_size 256: "):
            check_memory(model, options_for(batch_size=256, train_type=scheme))
    monkeypatch.setattr(models, "available_memory_mb", lambda: None)
    check_memory(model, options_for(batch_size=10**9))


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_no_network_is_refused_where_a_few_gigabytes_are_left(name, monkeypatch):
    model = models.build_model(name, 64, 10)
    monkeypatch.setattr(models, "available_memory_mb", lambda: 3000.0)
    for scheme in TRAIN_TYPES:
        check_memory(model, options_for(model_name=name, optimizer="adam", train_type=scheme))
