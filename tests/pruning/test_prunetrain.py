"""PruneTrain: what is removed leaves the function, the training and its state as they were; what stays is right."""

import json
import math
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
import zoo
from conftest import BATCH, CLASSES, make_small_model

import models
from elastic_trainer.networks.batch_norm import freeze_batch_norm_statistics
from elastic_trainer.networks.names import GLYPH_WEIGHTS
from elastic_trainer.pruning import prunetrain
from elastic_trainer.pruning.prunetrain import _Network
from elastic_trainer.selection.time_budget import Progress
from elastic_trainer.timing.flops import count_flops
from elastic_trainer.training.optimizers import make_optimizer
from elastic_trainer.training.step import TrainStep, classification_loss
from utils import UserError

EXACT = SimpleNamespace(prune_ratio=0.25, prune_threshold=1e-6)  # only channels that are zero count as dead
SHARE = 0.3
NETWORKS = ("small", "mobilenetv2", "resnet50", "vgg16")


class Batches:
    """Random images of the size that a model takes, for `importance_batches`."""

    batch_size, steps_per_epoch = BATCH, 5

    def __init__(self, model):
        rng = np.random.default_rng(5)
        images = rng.uniform(0, 255, (BATCH, *model.input_shape[1:])).astype(np.float32)
        self.batch = tf.constant(images), tf.constant(np.arange(BATCH, dtype=np.int32) % CLASSES)

    def importance_batches(self, index):
        return [self.batch]


def build(name, dropout=1e-9, augment="none"):
    """A network whose batch-norm parameters and biases are not all 0 or 1, with dropout that never happens.

    MobileNetV2 has weights that come with the project: made up ones do not let an image's signal through its 52 layers.
    """
    keras.utils.set_random_seed(0)
    weights = str(GLYPH_WEIGHTS) if name == "mobilenetv2" else "none"
    small = name == "small"
    model = make_small_model() if small else models.build_model(name, 32, CLASSES, weights, 0.35, augment)
    rng = np.random.default_rng(1)
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.Dropout):
            layer.rate = dropout
        for variable in layer._trainable_variables + layer._non_trainable_variables:
            if name == "mobilenetv2":
                continue
            if variable.name in ("gamma", "moving_variance"):
                variable.assign(rng.uniform(0.5, 1.5, variable.shape))
            elif variable.name in ("beta", "bias", "moving_mean"):
                variable.assign(rng.normal(0, 0.3, variable.shape))
    return model


def scheme_of(model, settings=EXACT):
    return prunetrain.PruneTrainScheme(model, Batches(model), settings, multiple=1)  # type: ignore[arg-type]


def built_optimizer(model, name="sgd", rate=1e-2):
    optimizer = make_optimizer(name, rate, 1e-3, 100)
    optimizer.build(model.trainable_variables)
    return optimizer


def zero(variable, axis, channels):
    values = variable.numpy()
    values[(slice(None),) * axis + (channels,)] = 0.0
    variable.assign(values)


def kill_readers(model, share=SHARE, seed=0):
    """Zero what reads a share of the channels of every group; returns {group's name: indices of these channels}."""
    network, rng, killed = _Network(model), np.random.default_rng(seed), {}
    for name, group in network.prunable().items():
        count = network.size(group)
        killed[name] = np.sort(rng.choice(count, int(share * count), replace=False))
        for kernel in network.readers(group).values():
            only = {group: killed[name]} | {
                other: np.arange(0) for other in network._roots(kernel.source) if other != group
            }
            zero(kernel.layer.kernel, len(kernel.layer.kernel.shape) - 2, network.places(kernel.source, only))
    return killed


def kill_writers(model, depthwise, share=SHARE):
    """Zero what writes the first channels of every group, in its convolutions or in its depthwise ones."""
    network = _Network(model)
    for group in network.prunable().values():
        for kernel in network.kernels.values():
            if kernel.depthwise == depthwise and network._roots(kernel.target) == (group,):
                axis = len(kernel.layer.kernel.shape) - 1 - kernel.depthwise
                zero(kernel.layer.kernel, axis, np.arange(int(share * network.size(group))))


def kept_of(scheme, network):
    return {group: scheme._kept[name] for name, group in network.prunable().items()}


def assert_survivors_equal(new, old, network, kept, rtol=1e-4, skip=()):
    """Each variable of `new` is the slice of its forerunner in `old` that `kept` says; `skip`: names not compared."""
    for after, before in zip(new.variables, old.variables, strict=True):
        if before.name not in skip:
            expected = prunetrain._cut(before.numpy(), before, network, kept)
            scale = np.abs(expected).max() if expected.size else 0.0
            np.testing.assert_allclose(after.numpy(), expected, atol=rtol * scale, err_msg=before.path)


def assert_same_logits(one, other, images):
    expected = one(images, training=False).numpy()
    assert np.ptp(expected, axis=0).max() > 1e-3 * np.abs(expected).max(), "logits that depend on nothing prove nothing"
    np.testing.assert_allclose(other(images, training=False).numpy(), expected, atol=1e-5 * np.abs(expected).max())


# --- nothing changes but the size -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETWORKS)
def test_removing_channels_that_nothing_reads_changes_neither_logits_nor_the_next_step(name):
    model = build(name)
    data, optimizer = Batches(model), built_optimizer(model)
    scheme = scheme_of(model)
    killed = kill_readers(model)
    step = TrainStep(model, optimizer, BATCH)
    network = _Network(model)
    smaller, carried = scheme.reconfigure(model, optimizer)

    for group, indices in killed.items():  # others may be silent on these few images
        assert not np.isin(indices, scheme._kept[group]).any()
    assert [v.path for v in smaller.trainable_variables] == [v.path for v in model.trainable_variables]
    assert smaller.count_params() < 0.8 * model.count_params()
    assert_same_logits(model, smaller, data.batch[0])

    smaller_step = TrainStep(smaller, carried, BATCH)
    flops, fewer = (sum(count_flops(s.graph).values()) for s in (step, smaller_step))
    assert fewer < 0.8 * flops
    assert step(*data.batch)[0] == pytest.approx(smaller_step(*data.batch)[0], rel=1e-5)
    # Real weights and deep networks have channels that are constant on these images: they are folded into these two.
    folded = () if name in ("small", "vgg16") else ("moving_mean", "bias")
    assert_survivors_equal(smaller, model, network, kept_of(scheme, network), skip=folded)


@pytest.mark.parametrize(
    ("name", "depthwise"), [("mobilenetv2", True), ("mobilenetv2", False), ("resnet50", False), ("vgg16", False)]
)
def test_what_is_left_of_channels_that_nothing_writes_is_folded_exactly(name, depthwise):
    model = build(name)
    data, optimizer = Batches(model), built_optimizer(model)
    scheme = scheme_of(model)
    kill_writers(model, depthwise)
    smaller, _ = scheme.reconfigure(model, optimizer)
    left, all_channels = scheme.channels()
    assert left < 0.95 * all_channels
    assert_same_logits(model, smaller, data.batch[0])
    if depthwise:  # 1×1 convolutions with batch norm read them all: nothing is in the way
        count = scheme._channels["block_3_expand/kernel"]
        assert scheme._kept["block_3_expand/kernel"].min() >= int(SHARE * count)


def two_convolutions(reader_size, beta):
    """Convolution, batch norm, ReLU, then a convolution that reads it, with a batch norm of its own."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8, 8, 3))
    x = keras.layers.Conv2D(6, 3, padding="same", use_bias=False, name="first")(inputs)
    x = keras.layers.BatchNormalization(beta_initializer=keras.initializers.Constant(beta), name="norm")(x)
    x = keras.layers.ReLU()(x)
    x = keras.layers.Conv2D(5, reader_size, padding="same", use_bias=False, name="second")(x)
    x = keras.layers.BatchNormalization(name="behind")(x)
    x = keras.layers.Flatten()(keras.layers.ReLU()(x))
    model = keras.Model(inputs, keras.layers.Dense(CLASSES, name="head")(x))
    return freeze_batch_norm_statistics(model)


@pytest.mark.parametrize(
    ("reader_size", "beta", "removed"), [(1, 0.7, True), (3, 0.7, False), (3, -0.7, True), (3, 0.0, True)]
)
def test_a_constant_is_folded_only_where_no_padding_mixes_with_it(reader_size, beta, removed):
    model = two_convolutions(reader_size, beta)
    zero(model.get_layer("first").kernel, 3, [1, 4])
    data, optimizer = Batches(model), built_optimizer(model)
    if beta < 0:  # else every channel of this network would be dead
        model.get_layer("norm").beta.assign(np.where(np.isin(np.arange(6), [1, 4]), beta, 0.5))
    result = scheme_of(model).reconfigure(model, optimizer)
    assert (result is not None) == removed
    if result:
        assert result[0].get_layer("first").filters == 4
        assert_same_logits(model, result[0], data.batch[0])


@pytest.mark.parametrize("function", zoo.ALL, ids=lambda function: function.__name__)
def test_own_networks_keep_their_logits_or_are_refused(function):
    keras.utils.set_random_seed(0)
    model = models.build_model(f"{zoo.__file__}:{function.__name__}", 12, CLASSES, augment="flip")
    data, optimizer = Batches(model), built_optimizer(model)
    try:
        scheme = scheme_of(model)
    except UserError as error:
        assert "--train_type prunetrain" in str(error)
        assert function.__name__ not in ("branches", "nested", "shared_weights")
        return
    kill_readers(model, share=0.5)
    smaller, carried = scheme.reconfigure(model, optimizer)
    assert smaller.count_params() < model.count_params()
    assert_same_logits(model, smaller, data.batch[0])
    TrainStep(smaller, carried, BATCH)(*data.batch)


@pytest.mark.parametrize("sequential", [True, False])
def test_inner_models_and_layers_of_ones_own_are_built_anew_with_fewer_channels(sequential):
    keras.utils.set_random_seed(0)
    inner = keras.Sequential([keras.Input((8, 8, 6)), keras.layers.ReLU(), keras.layers.Conv2D(5, 3, name="inside")])
    if not sequential:
        inner = keras.Model(inner.inputs, inner.outputs[0])
    inputs = keras.Input((8, 8, 3))
    x = inner(keras.layers.Conv2D(6, 3, padding="same", name="outside")(inputs))
    x = zoo.Gated()(keras.layers.Conv2D(4, 3)(x))
    model = keras.Model(inputs, keras.layers.Dense(CLASSES, name="head")(keras.layers.GlobalMaxPooling2D()(x)))
    data, optimizer = Batches(model), built_optimizer(model)
    scheme = scheme_of(model)
    kill_readers(model, share=0.5)
    smaller, carried = scheme.reconfigure(model, optimizer)
    assert [v.shape[-1] for v in smaller.trainable_variables if v.name == "kernel"] == [3, 3, 4, 4, CLASSES]
    assert_same_logits(model, smaller, data.batch[0])
    TrainStep(smaller, carried, BATCH)(*data.batch)


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_slots_step_counts_and_schedule_are_carried_over(name):
    model = build("small")
    data, optimizer = Batches(model), built_optimizer(model, name)
    scheme = scheme_of(model)
    mask = np.ones(len(model.trainable_variables), bool)
    TrainStep(model, optimizer, BATCH, mask)(*data.batch)
    mask[1] = False  # from now on, tensors have taken unequal numbers of steps
    for _ in range(2):
        TrainStep(model, optimizer, BATCH, mask)(*data.batch)
    kill_readers(model, share=0.5, seed=1)
    network = _Network(model)
    smaller, carried = scheme.reconfigure(model, optimizer)
    kept = kept_of(scheme, network)
    assert any(indices[-1] >= len(indices) for indices in kept.values()), "what stays must not just be the beginning"
    assert int(carried.iterations) == 3
    assert float(carried.learning_rate) == pytest.approx(float(optimizer.learning_rate))
    assert type(carried.get_config()["learning_rate"]) is type(optimizer.get_config()["learning_rate"])
    slots = ["momentums"] if name == "sgd" else ["_momentums", "_velocities", "_steps"]
    for attribute in slots:
        for k, (new, old) in enumerate(zip(getattr(carried, attribute), getattr(optimizer, attribute), strict=True)):
            variable, expected = model.trainable_variables[k], old.numpy()
            if expected.ndim:
                expected = prunetrain._cut(expected, variable, network, kept)
            np.testing.assert_array_equal(new.numpy(), expected)
            assert np.abs(old.numpy()).max() > 0
    if name == "adam":
        assert [int(steps) for steps in carried._steps][:3] == [3, 1, 3]
    TrainStep(model, optimizer, BATCH)(*data.batch)
    TrainStep(smaller, carried, BATCH)(*data.batch)
    assert_survivors_equal(smaller, model, network, kept)


def test_random_state_frozen_layers_and_the_model_itself_stay_as_they_are():
    model = build("mobilenetv2", dropout=0.2, augment="flip")
    backbone = next(layer for layer in model.layers if isinstance(layer, keras.Model))
    backbone.get_layer("Conv1").trainable = False
    data, optimizer = Batches(model), built_optimizer(model)
    scheme = scheme_of(model)
    for _ in range(3):
        model(data.batch[0], training=True)  # moves the random state on
    kill_readers(model)
    before = [v.numpy() for v in [*model.variables, *optimizer.variables]]
    seeds = [v.numpy() for v in model.variables if "seed" in v.path]
    assert len(seeds) == 2
    smaller, _ = scheme.reconfigure(model, optimizer)
    for variable, old in zip([*model.variables, *optimizer.variables], before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), old)
    np.testing.assert_array_equal(seeds, [v.numpy() for v in smaller.variables if "seed" in v.path])
    assert not any(v.path.startswith("Conv1/") for v in smaller.trainable_variables)
    statistics = [v for v in smaller.non_trainable_variables if "moving" in v.path]
    assert len(statistics) == 2 * 52
    assert all(type(layer) is not keras.layers.BatchNormalization for layer in smaller._flatten_layers())


def test_a_pruned_network_is_saved_and_loaded(tmp_path):
    model = build("mobilenetv2")
    data = Batches(model)
    scheme = scheme_of(model)
    kill_readers(model)
    smaller, _ = scheme.reconfigure(model, built_optimizer(model))
    smaller.save(tmp_path / "last.keras")
    loaded = keras.models.load_model(tmp_path / "last.keras")
    assert loaded.count_params() == smaller.count_params()
    assert_same_logits(smaller, loaded, data.batch[0])


# --- what is removed --------------------------------------------------------------------------------------------------


def test_a_channel_of_an_addition_goes_only_when_every_reader_can_do_without_it():
    model = build("resnet50")
    network = _Network(model)
    name = "conv2_block1_0_conv/kernel"  # its channels are those of all additions of the first stage
    if name not in network.prunable():
        name = next(other for other in network.prunable() if other.startswith("conv2_block1") and "3_conv" in other)
    group = network.prunable()[name]
    readers = list(network.readers(group).values())
    writers = [kernel for kernel in network.kernels.values() if network._roots(kernel.target) == (group,)]
    assert (len(readers), len(writers), network.size(group)) == (4, 4, 256)
    scheme = scheme_of(model)
    for kernel in readers[1:]:
        zero(kernel.layer.kernel, 2, [3, 7])
    zero(readers[0].layer.kernel, 2, [3])
    smaller, _ = scheme.reconfigure(model, built_optimizer(model))
    np.testing.assert_array_equal(scheme._kept[name], np.setdiff1d(np.arange(256), [3]))
    assert [kernel.layer.kernel.shape[-1] for kernel in _Network(smaller).kernels.values()].count(255) == 4


def test_one_channel_of_a_group_stays_though_all_are_dead():
    model = build("small")
    zero(model.get_layer("left").kernel, 2, slice(None))
    zero(model.get_layer("right").kernel, 2, slice(None))
    scheme = scheme_of(model)
    smaller, _ = scheme.reconfigure(model, built_optimizer(model))
    assert smaller.get_layer("stem").filters == 1
    images = Batches(model).batch[0]
    np.testing.assert_allclose(smaller(images), model(images), atol=1e-5)


def test_small_is_relative_to_the_first_median_of_what_a_reader_gets():
    model = two_convolutions(reader_size=1, beta=0.5)
    optimizer = built_optimizer(model)
    writer, norm, reader = (model.get_layer(name) for name in ("first", "norm", "second"))
    writer.kernel.assign(np.ones(writer.kernel.shape))  # all channels alike, and proportional to their scale
    norm.beta.assign(np.zeros(6))
    norm.gamma.assign([1.0, 1.0, 0.3, 1.0, 1.0, 1.0])
    reader.kernel.assign(np.ones(reader.kernel.shape) * [[1.0], [0.3], [2.0], [1.1], [1.0], [1.0]])

    def pruned(threshold):
        settings = SimpleNamespace(prune_ratio=0.2, prune_threshold=threshold)
        result = scheme_of(model, settings).reconfigure(model, optimizer)
        return 6 - result[0].get_layer("first").filters if result else 0

    assert [pruned(threshold) for threshold in (0.25, 0.35, 0.65)] == [0, 1, 2]  # 0.3 · 1 and 0.3 · 2
    scheme = scheme_of(model, SimpleNamespace(prune_ratio=0.2, prune_threshold=0.35))
    model, optimizer = scheme.reconfigure(model, optimizer)
    model.get_layer("second").kernel.assign(model.get_layer("second").kernel * 3.0)
    assert scheme.reconfigure(model, optimizer) is None
    model.get_layer("norm").gamma.assign([0.1, 0.3, 1.0, 1.0, 1.0])  # 0.3 in all, as the one that went before
    smaller, _ = scheme.reconfigure(model, optimizer)
    assert smaller.get_layer("first").filters == 4


def test_channels_go_by_eights_the_least_first():
    model = build("mobilenetv2")
    scheme = prunetrain.PruneTrainScheme(model, Batches(model), EXACT)  # type: ignore[arg-type]
    killed = kill_readers(model)
    scheme.reconfigure(model, built_optimizer(model))
    for name, indices in killed.items():
        count, kept = scheme._channels[name], scheme._kept[name]
        assert len(kept) % 8 == 0 and len(kept) <= math.ceil((count - len(indices)) / 8) * 8
        assert np.isin(indices, kept).sum() <= 7


def test_nothing_is_rebuilt_while_nothing_is_dead():
    model = two_convolutions(reader_size=1, beta=0.5)
    for name in ("first", "second"):  # no channel is silent
        model.get_layer(name).kernel.assign(np.abs(model.get_layer(name).kernel.numpy()))
    scheme = scheme_of(model)
    assert scheme.reconfigure(model, built_optimizer(model)) is None
    assert scheme.channels() == (11, 11)


@pytest.mark.parametrize("name", ["vit", f"{zoo.__file__}:subclassed", f"{zoo.__file__}:attention"])
def test_a_network_without_channels_to_remove_is_refused(name):
    model = models.build_model(name, 32, CLASSES, augment="none")
    with pytest.raises(UserError, match=r"--train_type prunetrain: .* choose another --train_type"):
        scheme_of(model)


class NoConfig(keras.layers.Layer):
    """A layer that cannot be made from its configuration."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def call(self, inputs):
        return self.function(inputs)


def test_a_network_that_keras_cannot_build_anew_is_refused_at_once():
    inputs = keras.Input((8, 8, 3))
    x = keras.layers.Conv2D(4, 3, name="second")(keras.layers.Conv2D(4, 3, name="first")(inputs))
    x = keras.layers.GlobalAveragePooling2D()(NoConfig(tf.nn.relu)(x))
    model = keras.Model(inputs, keras.layers.Dense(CLASSES)(x))
    with pytest.raises(UserError, match="--train_type prunetrain: Keras cannot build"):
        scheme_of(model)


# --- lasso and scheme -------------------------------------------------------------------------------------------------


def test_the_lasso_and_its_gradient_are_those_of_the_definition():
    model = build("small")
    zero(model.get_layer("left").kernel, 2, [1])  # a slice of zeros: gradient 0, not NaN
    kernels = {name: model.get_layer(name).kernel for name in ("stem", "left", "right", "head")}
    slices = {"stem": [3], "left": [2, 3], "right": [2], "head": [0]}  # image and logits have no groups
    with tf.GradientTape() as tape:
        value = prunetrain.group_lasso(model)
    gradients = dict(zip(kernels, tape.gradient(value, [k.value for k in kernels.values()]), strict=True))
    total = 0.0
    for name, kernel in kernels.items():
        weights, expected = kernel.numpy(), 0.0
        for axis in slices[name]:
            rest = tuple(other for other in range(weights.ndim) if other != axis)
            norms = np.sqrt((weights**2).sum(rest, keepdims=True))
            total += norms.sum()
            expected = expected + weights / np.maximum(norms, 1e-30)
        np.testing.assert_allclose(gradients[name], expected, atol=1e-5, err_msg=name)
    assert float(value) == pytest.approx(total, rel=1e-5)


def test_lambda_makes_the_penalty_the_given_share_of_the_first_loss():
    model = build("small")
    data = Batches(model)
    scheme = scheme_of(model, SimpleNamespace(prune_ratio=0.2, prune_threshold=0.0))
    penalty = float(scheme.penalty(model))
    images, labels = data.batch
    loss = float(classification_loss(labels, model(images, training=False)))
    assert penalty / (penalty + loss) == pytest.approx(0.2)


def test_the_structure_is_restored_on_a_full_network_and_training_goes_on_alike():
    model = two_convolutions(reader_size=3, beta=0.5)
    data, optimizer = Batches(model), built_optimizer(model, rate=1e-6)
    scheme = scheme_of(model)
    assert scheme.choose(Progress(), optimizer).mask.sum() == len(model.trainable_variables)
    for seed in (0, 1):  # the second cut is one of an already smaller network
        kill_readers(model, share=0.5, seed=seed)
        model, optimizer = scheme.reconfigure(model, optimizer)
        TrainStep(model, optimizer, BATCH)(*data.batch)
    state = json.loads(json.dumps(scheme.state()))

    fresh = two_convolutions(reader_size=3, beta=0.5)
    other = scheme_of(fresh)
    resumed, resumed_optimizer = other.restore(state, fresh, built_optimizer(fresh, rate=1e-6))
    assert [v.shape for v in resumed.variables] == [v.shape for v in model.variables]
    assert other.state() == scheme.state()
    # The same channels of the first network: a step at this rate leaves them where they were, nearly.
    for name in ("first", "second"):
        np.testing.assert_allclose(resumed.get_layer(name).kernel, model.get_layer(name).kernel, atol=0.03)
    for variables, saved in ((resumed.variables, model.variables), (resumed_optimizer.variables, optimizer.variables)):
        for variable, old in zip(variables, saved, strict=True):
            variable.assign(old.numpy())
    assert_same_logits(model, resumed, data.batch[0])
    assert float(other.penalty(resumed)) == pytest.approx(float(scheme.penalty(model)))
    for one in (model, resumed):
        kill_readers(one, share=0.5, seed=2)
    further, again = scheme.reconfigure(model, optimizer)[0], other.reconfigure(resumed, resumed_optimizer)[0]
    assert scheme.state() == other.state()
    assert_same_logits(further, again, data.batch[0])


def test_an_unpruned_state_restores_to_the_network_itself_and_a_foreign_one_is_refused():
    model = build("small")
    scheme = scheme_of(model)
    optimizer = built_optimizer(model)
    assert scheme.restore(scheme.state(), model, optimizer) == (model, optimizer)
    foreign = {**scheme.state(), "channels": {"stem/kernel": {"of": 9, "kept": [0]}}}
    with pytest.raises(UserError, match="9 channels at stem/kernel, this network has 4"):
        scheme.restore(foreign, model, optimizer)
