"""Steps in parts of a batch: they train as whole ones, from features and across selections, and go on after a stop."""

from dataclasses import replace

import keras
import numpy as np
import pytest
from conftest import make_table
from small_networks import values

from elastic_trainer import ArrayData, Settings, Trainer, freeze_batch_norm
from elastic_trainer.cli.commands import parse_training
from elastic_trainer.cli.resolve import part_of
from elastic_trainer.engine.memory import step_memory, variables_mb
from elastic_trainer.engine.step import TrainStep
from elastic_trainer.engine.task import CompiledTask
from elastic_trainer.networks.tensors import all_mask, head_mask
from elastic_trainer.profiling.memory_check import TracedSteps
from elastic_trainer.system.errors import UserError
from elastic_trainer.timing.flops import count_flops
from elastic_trainer.timing.table_file import table_folder
from models import build_model

BATCH = 16
SETTINGS = Settings(num_epochs=2, interval=1, rho=0.6, deterministic=True, micro_batch=4)
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.02, momentum=0.9),
    "adamw": lambda: keras.optimizers.AdamW(0.002, clipnorm=0.5),
}


def small_network(optimizer="sgd", loss=None, seed=0):
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((12, 12, 3))
    x = inputs
    for k in range(4):
        x = keras.layers.Conv2D(8, 3, padding="same", kernel_regularizer="l2" if k == 1 else None)(x)
        x = keras.layers.ReLU()(keras.layers.BatchNormalization()(x))
    model = keras.Model(inputs, keras.layers.Dense(3)(keras.layers.GlobalAveragePooling2D()(x)))
    freeze_batch_norm(model)
    loss = loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(OPTIMIZERS[optimizer](), loss, metrics=["accuracy"], weighted_metrics=["accuracy"])
    model.optimizer.build(model.trainable_variables)
    return model


def data(count=80, weighted=True):
    rng = np.random.default_rng(0)
    images = rng.normal(size=(count, 12, 12, 3)).astype(np.float32)
    weights = (rng.uniform(0.1, 3, count).astype(np.float32),) if weighted else ()
    examples = (images, rng.integers(0, 3, count), *weights)
    return ArrayData(examples, tuple(part[:8] for part in examples), batch_size=BATCH)


def close(model, other, tolerance=1e-5):
    for one, two in zip(values(model.trainable_variables), values(other.trainable_variables), strict=True):
        np.testing.assert_allclose(one, two, rtol=tolerance, atol=tolerance * np.abs(two).max())


@pytest.mark.parametrize(("optimizer", "weighted"), [("sgd", False), ("adamw", True)])
def test_ten_steps_in_parts_give_the_weights_of_whole_steps(optimizer, weighted):
    models, logs = [], list[np.ndarray]()
    for size in (0, 1, 4):
        model = small_network(optimizer)
        trainer = Trainer(model, data(weighted=weighted), "full_training", replace(SETTINGS, micro_batch=size))
        trainer.run()
        models.append(model)
        assert trainer.history.step == 10 and int(model.optimizer.iterations.numpy()) == 10
        rows = [[row["train_loss"], row["train_accuracy"]] for row in trainer.history.epochs]
        logs.append(np.ravel([*rows, [trainer.results()["train_flops"], 1.0]]))
    for model, log in zip(models[1:], logs[1:], strict=True):
        close(model, models[0])
        np.testing.assert_allclose(log, logs[0], rtol=0.05)
        np.testing.assert_allclose(log[:4], logs[0][:4], rtol=1e-4)


@pytest.mark.parametrize(("scheme", "cache"), [("elastic_training", "float32"), ("elastic_training_upper_part", "off")])
def test_over_selections_exactly_the_selected_variables_move_as_in_whole_steps(scheme, cache):
    moved = []
    for micro_batch in (0, 4):
        model = small_network()
        table = make_table(model, t_fw_ms=1.0)
        settings = replace(SETTINGS, num_epochs=6, interval=2, feature_cache=cache, micro_batch=micro_batch)
        trainer = Trainer(model, data(), scheme, settings, table=table)
        masks, uses = list[np.ndarray](), list[bool]()
        for step in (10, 20, 30):
            before = values(model.trainable_variables)
            trainer.run(until_step=step)
            now = values(model.trainable_variables)
            mask = np.array([(old != new).any() for old, new in zip(before, now, strict=True)])
            assert (mask == trainer.history.selection.mask).all() and not mask.all()
            masks.append(mask)
            uses.append(trainer.training.features.split is not None)
        assert len(trainer.history.selections) == 3 and any(uses) == (cache != "off")
        moved.append((model, masks))
    assert all((one == two).all() for one, two in zip(moved[0][1], moved[1][1], strict=True))
    close(
        moved[0][0], moved[1][0], 1e-5 if cache == "off" else 1e-4
    )  # 30 steps; features of 4 images differ in rounding


def test_a_resumed_run_equals_an_unbroken_one_bit_for_bit():
    settings = replace(SETTINGS, num_epochs=4, interval=2)
    finals = list[list[np.ndarray]]()
    for stops in ((), (3, 10, 13)):
        model = small_network()
        trainer = Trainer(model, data(), "elastic_training", settings, table=make_table(model, t_fw_ms=1.0))
        for stop in stops:
            trainer.run(until_step=stop)
            saved = trainer.state()
            model = small_network(seed=9)
            trainer = Trainer(model, data(), "elastic_training", settings, table=make_table(model, t_fw_ms=1.0))
            trainer.load(saved)
        trainer.run()
        finals.append(values(model.variables))
    for one, two in zip(*finals, strict=True):
        np.testing.assert_array_equal(one, two)


def test_memory_is_that_of_a_part_and_of_the_sums_of_gradients(monkeypatch):
    model = small_network()
    found, sums_mb = [], variables_mb(model.trainable_variables)
    monkeypatch.setattr("elastic_trainer.system.memory_budget.resident_memory_mb", lambda: 0.0)
    for micro_batch in (0, 4):
        settings = replace(SETTINGS, micro_batch=micro_batch)
        trainer = Trainer(model, data(), "full_training", settings)
        trainer.run(until_step=1)
        found.append(trainer.training.predicted_mb)
        assert sum(count_flops(trainer.training.step_graph).values()) > 0
    task = CompiledTask(model, *data().specs)
    whole, part = (step_memory(TrainStep(task, model.optimizer, rows, parts=p)) for rows, p in ((16, 1), (4, 4)))
    assert part.by_rows_mb == pytest.approx(whole.by_rows_mb / 4, rel=0.1)
    assert min(part.sums_mb[0], whole.sums_mb[0]) > sums_mb
    assert whole.needed_mb(16, 4) == pytest.approx(whole.fixed_mb + whole.by_rows_mb / 4 + whole.sums_mb)
    assert part.needed_mb(16, 4) == pytest.approx(whole.needed_mb(16, 4), rel=0.1), "as the whole step says"
    assert found == pytest.approx([whole.needed_mb(16)[0], part.needed_mb(16, 4)[0]])


def test_a_table_of_parts_says_that_a_step_takes_as_long_as_its_parts():
    model = small_network()
    table = make_table(model, t_fw_ms=1.0)
    scaled = table.in_parts(4)
    for mask in (head_mask(model), all_mask(model)):
        for misses in (1.0, 0.2, 0.0):
            assert scaled.predict_ms(mask, misses) == pytest.approx(4 * table.predict_ms(mask, misses))
    assert scaled.full_step_ms == 4 * table.full_step_ms and scaled.digest() != table.digest()
    assert table.in_parts(1) is table


@pytest.mark.parametrize("reduction", ["sum", None])
def test_losses_that_are_no_means_are_refused(reduction):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    model = small_network(loss=loss)
    if reduction is None:
        model = small_network()
        model.outputs[0]._keras_mask = True
    with pytest.raises(UserError, match=r"^--micro_batch: ") as error:
        Trainer(model, data(), "full_training", SETTINGS)
    assert "\n" not in str(error.value)


def test_a_run_of_main_profiles_a_part_and_checks_its_memory():
    settings = parse_training(["--batch_size", "128", "--micro_batch", "8"])
    assert settings.batch_size == 128 and settings.micro_batch == 8
    assert table_folder(part_of(settings)).name.endswith("_8")
    assert part_of(parse_training(["--batch_size", "32"])).batch_size == 32
    model = build_model("mobilenetv2", 64, 10, alpha=0.35)
    whole, parts = (TracedSteps(model, settings).needed_mb(all_mask(model), 128, size) for size in (None, 8))
    assert parts < 0.7 * whole
    refused = r"^--micro_batch: cannot be combined with .*prunetrain"
    with pytest.raises(UserError, match=refused):
        parse_training(["--micro_batch", "8", "--train_type", "prunetrain"])
    with pytest.raises(UserError, match=refused):
        Trainer(small_network(), data(), "prunetrain", SETTINGS)
