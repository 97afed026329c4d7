"""The user's own Keras models, each model of zoo.py: attribution of times, what trains, and errors in one line."""

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
import zoo
from conftest import BATCH, CLASSES, attribute_times, full_step, naive_needs

import models
import profiler
from elastic_trainer.engine.optimizers import make_optimizer
from elastic_trainer.engine.step import TrainStep
from elastic_trainer.engine.task import ImageClassification
from elastic_trainer.networks.tensors import head_mask
from elastic_trainer.settings import Settings
from elastic_trainer.system.errors import UserError
from elastic_trainer.timing.trace import read_op_times, trace_step

SIZE = 12
STEPS = 4
ZOO = str(Path(zoo.__file__))


def build(function):
    keras.utils.set_random_seed(0)
    return models.build_model(f"{ZOO}:{function.__name__}", SIZE, CLASSES)


def a_batch():
    rng = np.random.default_rng(0)
    images = rng.uniform(0, 255, (BATCH, SIZE, SIZE, 3)).astype(np.float32)
    return tf.constant(images), tf.constant(np.arange(BATCH, dtype=np.int32) % CLASSES)


@pytest.fixture(scope="module", params=zoo.ALL, ids=lambda function: function.__name__)
def traced(request, tmp_path_factory):
    """A model, its full step, the traced times of its operations, their unmatched share, and their attribution."""
    model = build(request.param)
    step = full_step(model)
    batch = a_batch()
    step(*batch)
    trace = trace_step(lambda: step(*batch), STEPS, tmp_path_factory.mktemp("trace"))
    op_ms, unmatched = read_op_times(trace, step.graph, STEPS)
    return model, step, op_ms, unmatched, attribute_times(step, model.trainable_variables, op_ms)


def test_attribution_covers_every_tensor_and_sums_to_the_trace(traced):
    model, step, op_ms, unmatched, costs = traced
    assert sorted(costs.positions) == list(range(len(model.trainable_variables)))
    counted = costs.forward_ms + costs.other_ms + costs.t_dw_ms.sum() + costs.t_dy_ms.sum()
    assert counted == pytest.approx(sum(op_ms.values()))
    assert unmatched < 0.02
    for rank, k in enumerate(costs.positions):
        if step.gradients[k] is not None:
            assert costs.update_ms[rank] > 0


def test_forward_products_have_their_time_also_where_they_are_fused(traced):
    """The graph optimizer fuses them with what follows, and names that operation after the last one."""
    _, step, op_ms, *_ = traced
    forward, _ = naive_needs(step)
    products = [step.graph.get_operation_by_name(name) for name in forward]
    products = [op.name for op in products if op.type in ("Conv2D", "DepthwiseConv2dNative", "MatMul")]
    assert products
    assert [name for name in products if not op_ms.get(name)] == []


def test_a_step_changes_only_selected_variables_and_no_statistics(traced):
    model = traced[0]
    variables = model.trainable_variables
    optimizer = make_optimizer("sgd", 0.1, 0.0, 10)
    optimizer.build(variables)
    rng = np.random.default_rng(0)
    statistics = [v for v in model.non_trainable_variables if "moving" in v.name]
    mask = head_mask(model) | (rng.random(len(variables)) < 0.5)
    before = [v.numpy() for v in variables], [v.numpy() for v in statistics]
    step = TrainStep(ImageClassification(model), optimizer, BATCH, mask)
    step(*a_batch())
    moved = np.array([(old != v.numpy()).any() for old, v in zip(before[0], variables, strict=True)])
    assert not moved[~mask].any()
    reached = sum(gradient is not None for gradient in step.gradients)
    assert moved.sum() >= 0.7 * reached  # a dead ReLU or a bias before a norm may have a gradient of 0
    for old, variable in zip(before[1], statistics, strict=True):
        np.testing.assert_array_equal(old, variable.numpy())


def test_every_batch_norm_is_frozen_and_the_head_is_found(traced):
    model = traced[0]
    assert not any(type(layer) is keras.layers.BatchNormalization for layer in model._flatten_layers())
    head = head_mask(model)
    shapes = {tuple(v.shape)[-1] for v, taken in zip(model.trainable_variables, head, strict=True) if taken}
    assert head.sum() == 2 and shapes == {CLASSES}
    logits = model(a_batch()[0]).numpy()
    assert np.abs(logits.sum(axis=1) - 1).max() > 1e-3  # logits, not probabilities, which sum to 1


@pytest.mark.usefixtures("quick_profiles")
def test_profiling_warns_of_a_variable_without_gradient(tmp_path):
    model = build(zoo.without_gradient)
    network = Settings(optimizer="sgd", batch_size=BATCH)
    table = profiler.profile(model, network, tmp_path)
    (name,) = table.details["tensors_without_gradient"]
    assert name.endswith("/unused")
    assert f"warning: {name} has no influence on the loss" in "\n".join(profiler._report(table, head_mask(model)))


# --- the user's files -------------------------------------------------------------------------------------------------


def save_softmax_model(path, classes):
    inputs = keras.Input((SIZE, SIZE, 3))
    x = keras.layers.BatchNormalization()(keras.layers.Conv2D(4, 3, name="conv")(inputs))
    x = keras.layers.GlobalAveragePooling2D()(x)
    model = keras.Model(inputs, keras.layers.Softmax()(keras.layers.Dense(classes, name="last")(x)))
    model.save(path)
    return model


def test_errors_in_own_models_are_one_line(tmp_path):
    save_softmax_model(tmp_path / "my.keras", CLASSES)
    (tmp_path / "junk.keras").write_text("no model")
    (tmp_path / "bad.py").write_text(
        "import keras\n"
        "def fails(shape, classes):\n    return 1 / 0\n"
        "def nothing(shape, classes):\n    pass\n"
        "def features(shape, classes):\n    return keras.Sequential([keras.Input(shape), keras.layers.Conv2D(2, 3)])\n"
        "def fixed(shape, classes):\n    return keras.Sequential([keras.Input(shape),\n"
        "        keras.layers.GlobalAveragePooling2D()])\n"
        "def several(shape, classes):\n    image = keras.Input(shape)\n"
        "    x = keras.layers.Dense(classes)(keras.layers.Flatten()(image))\n    return keras.Model(image, [x])\n"
        "def leaves(shape, classes):\n    exit()\n"
        "class Leaving(keras.Model):\n    def call(self, images):\n        raise SystemExit(0)\n"
        "def leaves_later(shape, classes):\n    return Leaving()\n"
        "def grey(shape, classes):\n    return keras.Sequential([keras.Input((12, 12, 1)), keras.layers.Flatten(),\n"
        "        keras.layers.Dense(classes)])\n"
        "def nan(shape, classes):\n    return keras.Sequential([keras.Input(shape), keras.layers.Flatten(),\n"
        "        keras.layers.Dense(classes, bias_initializer=keras.initializers.Constant(float('nan')))])\n"
    )
    cases = {
        "junk.keras": "Keras cannot load it",
        "bad.py:fails": r"bad.py line 3: ZeroDivisionError: division by zero",
        "bad.py:nothing": "must return a keras.Model, not NoneType",
        "bad.py:absent": "has no function 'absent'",
        "bad.py:features": r"returns \(None, 10, 10, 2\), not logits for 3 classes",
        "bad.py:fixed": "has no trainable weights, so there is nothing to train",
        "bad.py:several": r"returns \[\(None, 3\)\], not logits for 3 classes: one tensor of",
        "bad.py:leaves": "bad.py line 16: SystemExit",
        "bad.py:leaves_later": "does not take images of shape .*: SystemExit: 0",
        "bad.py:grey": r"does not take images of shape .*it takes \(None, 12, 12, 1\)",
        "bad.py:nan": r"bad.py:nan: contains weights that are not finite, such as .*/bias; they come from a damaged",
    }
    for name, message in cases.items():
        with pytest.raises(UserError, match=message):
            models.build_model(str(tmp_path / name), SIZE, CLASSES)
    with pytest.raises(UserError, match=r"does not take images of shape \(20, 20, 3\) \(see --input_size\): "):
        models.build_model(str(tmp_path / "my.keras"), 20, CLASSES)


def frozen(shape, classes):
    """A network with a frozen base, and a frozen bias in the layer that follows it."""
    inputs = keras.Input(shape)
    scaled = keras.layers.Normalization(mean=None, name="scaled")
    scaled.adapt(a_batch()[0])
    base = keras.Sequential(
        [keras.layers.Conv2D(4, 3), keras.layers.BatchNormalization(), keras.layers.Dropout(0.2, seed=1)], name="base"
    )
    x = keras.layers.GlobalAveragePooling2D()(base(scaled(inputs)))
    given = keras.Model(inputs, keras.layers.Dense(classes, name="last")(x))
    base.trainable = False
    given.get_layer("last").bias.trainable = False
    return given


@pytest.mark.parametrize("is_file", [True, False])
def test_frozen_layers_become_trainable_and_statistics_do_not(is_file, tmp_path, capsys):
    frozen((SIZE, SIZE, 3), CLASSES).save(tmp_path / "my.keras")
    name = str(tmp_path / "my.keras") if is_file else f"{__file__}:frozen"
    model = models.build_model(name, SIZE, CLASSES)
    count = 5 - (1 if is_file else 0)  # Keras does not save that a single weight is frozen
    line = f"{name}: {count} of 6 weights were frozen; what trains is decided by --train_type alone"
    assert line in capsys.readouterr().out
    assert len(model.trainable_variables) == 6
    fixed = ["count", "mean", "moving_mean", "moving_variance", "seed_generator_state", "variance"]
    assert sorted(variable.name for variable in model.non_trainable_variables) == fixed
    save_softmax_model(tmp_path / "free.keras", CLASSES)
    models.build_model(str(tmp_path / "free.keras"), SIZE, CLASSES)
    assert "were frozen" not in capsys.readouterr().out


def test_weights_of_the_given_model_load_though_its_softmax_is_removed(tmp_path):
    inputs = keras.Input((SIZE, SIZE, 3))
    inner = keras.Sequential(
        [keras.Input((SIZE, SIZE, 3)), keras.layers.Flatten(), keras.layers.Dense(CLASSES), keras.layers.Softmax()]
    )
    given = keras.Model(inputs, inner(inputs))
    given.save(tmp_path / "my.keras")
    for weight in given.weights:
        weight.assign(keras.random.normal(weight.shape, seed=3) * 1e-3)
    given.save_weights(tmp_path / "my.weights.h5")
    model = models.build_model(str(tmp_path / "my.keras"), SIZE, CLASSES, str(tmp_path / "my.weights.h5"), 1)
    images = a_batch()[0]
    np.testing.assert_allclose(tf.nn.softmax(model(images)), given(images), atol=1e-6)
