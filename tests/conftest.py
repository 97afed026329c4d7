"""What most tests share: a small network with a head, a small data set, and an invented timing table for them."""

import importlib.util
from types import SimpleNamespace
from typing import Any

from elastic_trainer.system.machine import load_tensorflow

load_tensorflow()

import keras
import numpy as np
import pytest

from elastic_trainer.datasets.image_data import ImageData
from elastic_trainer.datasets.images import Images
from elastic_trainer.engine.optimizers import make_optimizer
from elastic_trainer.engine.step import TrainStep
from elastic_trainer.engine.task import ImageClassification
from elastic_trainer.networks.batch_norm import freeze_batch_norm
from elastic_trainer.networks.tensors import head_mask, tensor_names
from elastic_trainer.profiling import measuring, profile
from elastic_trainer.runs import trainer
from elastic_trainer.timing.attribution import attribute
from elastic_trainer.timing.fit import Fit
from elastic_trainer.timing.table import TimingTable

SIZE, CLASSES, BATCH = 8, 3, 4
SMALL_VIT: dict[str, Any] = {"dropout": 0.1, "mlp_dim": 64, "num_heads": 2, "num_layers": 2, "hidden_size": 32}
pytest.register_assert_rewrite("small_boards")


def make_small_model(seed=0, classes=CLASSES):
    """Two convolutions with frozen batch norm, two parallel branches, dropout and a head, at SIZE×SIZE."""
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((SIZE, SIZE, 3))
    x = keras.layers.Rescaling(1 / 255)(inputs)
    x = keras.layers.Conv2D(4, 3, padding="same", use_bias=False, name="stem")(x)
    x = keras.layers.BatchNormalization(name="stem_bn")(x)
    x = keras.layers.ReLU()(x)
    left = keras.layers.Conv2D(4, 1, name="left")(x)
    right = keras.layers.DepthwiseConv2D(3, padding="same", name="right")(x)
    x = keras.layers.Add()([left, right])
    x = keras.layers.BatchNormalization(name="tail_bn")(x)
    x = keras.layers.GlobalAveragePooling2D()(x)
    x = keras.layers.Dropout(0.2, seed=seed)(x)
    return freeze_batch_norm(keras.Model(inputs, keras.layers.Dense(classes, name="head")(x)))


def make_small_data(count=24, seed=0, augment="none"):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (count, SIZE, SIZE, 3), dtype=np.uint8)
    labels = (np.arange(count) % CLASSES).astype(np.int32)
    pixels = Images(images, labels)
    return ImageData("small", [str(k) for k in range(CLASSES)], pixels, pixels, BATCH, seed, augment=augment)


def make_table(model, t_dy_ms=1.0, t_dw_ms=1.0, constant_ms=2.0, t_fw_ms=0.0):
    """A timing table in which every tensor costs the same, tensors ordered from the last to the first.

    The forward pass is free, or, with `t_fw_ms`, takes as long as a prefix as when it is recomputed.
    """
    names = tensor_names(model)
    count = len(names)
    positions = np.arange(count)[::-1]
    return TimingTable(
        names=[names[k] for k in positions],
        shapes=[tuple(model.trainable_variables[k].shape) for k in positions],
        positions=positions,
        t_dw_ms=np.full(count, t_dw_ms),
        t_dy_ms=np.full(count, t_dy_ms),
        t_fw_ms=np.full(count, t_fw_ms),
        kernels=np.full(count, -1),
        features_mb=np.zeros(count),
        preprocessing_ms=0.0,
        full_step_ms=constant_ms + count * (t_dy_ms + t_dw_ms + t_fw_ms),
        gradient_pass_ms=constant_ms + count * (t_dy_ms + t_fw_ms) + 0.123,  # differs from the time of every selection
        fit=Fit(constant_ms, 1.0, 1.0, 1.0, 0.0, 0.0, 1, 1),
        details={},
    )


def attribute_times(step, variables, op_ms):
    """What `attribute` finds, and the times that it adds up to."""
    attribution = attribute(step, variables)
    return SimpleNamespace(**vars(attribution), **attribution.times(op_ms)._asdict())


def full_step(model, optimizer_name="sgd"):
    optimizer = make_optimizer(optimizer_name, 0.0, 5e-4, 1)
    optimizer.build(model.trainable_variables)
    return TrainStep(ImageClassification(model), optimizer, BATCH)


def ancestors(op, found):
    """The set `found` with the names of `op` and of all that it depends on, by following inputs one by one."""
    if op.name not in found:
        found.add(op.name)
        for before in [*(tensor.op for tensor in op.inputs), *op.control_inputs]:
            ancestors(before, found)
    return found


def naive_needs(step):
    """Names of the operations that the loss, and each gradient, depends on, by following inputs one by one.

    What only the tensors of one folded pair share is left to the first of them.
    """
    forward = ancestors(step.loss.op, set())
    gradients = step.gradients
    needs = [ancestors(gradient.op, set()) - forward if gradient is not None else set() for gradient in gradients]
    for members in naive_pairs(step):
        outside = set().union(*(needs[k] for k in range(len(needs)) if k not in members))
        for rank, k in enumerate(members):
            for later in members[rank + 1 :]:
                needs[later] -= needs[k] - outside
    return forward, needs


def naive_pairs(step):
    """Indices of the tensors of each folded pair, in the order in which they keep what they share."""
    numbers = {id(variable): k for k, variable in enumerate(step.variables)}
    return [[numbers[id(variable)] for variable in pair.tensors] for pair in step.folded_pairs]


FEW_SELECTIONS = ((0.25, 1.0), (0.7, 1.0))  # as of `measuring.CALIBRATION`
HAS_VIT = importlib.util.find_spec("vit_keras") is not None
NEEDS_VIT = pytest.mark.skipif(not HAS_VIT, reason="vit-keras is not installed: it allows no Python above 3.11")


def with_vit(names):
    """Parameters of a test: ViT is skipped where vit-keras is not installed."""
    return [pytest.param(name, marks=NEEDS_VIT) if name == "vit" else name for name in names]


@pytest.fixture
def tick_after_each_step(monkeypatch):
    monkeypatch.setattr(trainer, "TICK_SECONDS", 0.0)


@pytest.fixture(scope="module")
def small_vit():
    """ViT-B/16 has a thousandth of its weights, in the same layers."""
    with pytest.MonkeyPatch.context() as patch:
        if HAS_VIT:
            patch.setattr("vit_keras.vit.CONFIG_B", SMALL_VIT)
        yield


@pytest.fixture(scope="module")
def quick_profiles():
    """Timing tables that this process measures are of few selections, rounds and traced steps.

    Those without features are of every second entry of `CALIBRATION`.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "CALIBRATION", [one for one in FEW_SELECTIONS for _ in range(2)])
        patch.setattr(measuring, "MAX_ROUNDS", measuring.MIN_ROUNDS)
        patch.setattr(profile, "MAX_TRACED", profile.MIN_TRACED)
        yield


@pytest.fixture
def small_model():
    return make_small_model()


@pytest.fixture
def small_data():
    return make_small_data()


@pytest.fixture(params=["mixed_bfloat16", "mixed_float16"])
def half_precision(request):
    """Networks made in this test compute in half precision; gives the name of the policy."""
    keras.config.set_dtype_policy(request.param)
    yield request.param
    keras.config.set_dtype_policy("float32")


@pytest.fixture(scope="module")
def case():
    """A timing table of the small network, and the mask of its head."""
    model = make_small_model()
    return make_table(model, t_dy_ms=0.5, t_dw_ms=0.5, constant_ms=3.0), head_mask(model)


@pytest.fixture(scope="module")
def with_forward():
    """As `case`, with a forward pass that is half of the step."""
    model = make_small_model()
    return make_table(model, t_dy_ms=0.5, t_dw_ms=0.5, constant_ms=1.0, t_fw_ms=1.0), head_mask(model)
