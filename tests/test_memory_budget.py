"""Runs within a memory budget: what they select, what they refuse, and what the process really takes."""

import json
import re
from dataclasses import replace

import keras
import numpy as np
import pytest
from command_line import NETWORK, command
from conftest import make_table

from elastic_trainer import ArrayData, ElasticTraining, Settings, Trainer
from elastic_trainer.engine.memory import step_memory
from elastic_trainer.engine.step import TrainStep
from elastic_trainer.engine.task import CompiledTask
from elastic_trainer.networks.tensors import head_mask
from elastic_trainer.selection.importance import ImportanceEvaluator
from elastic_trainer.selection.plan import COMPARED_RHOS, run_plan
from elastic_trainer.selection.select import select_tensors, select_upper_part
from elastic_trainer.system.errors import UserError
from elastic_trainer.system.memory_budget import MemoryBudget
from elastic_trainer.timing.attribution import attribute

BATCH, START_MB = 16, 50.0
SETTINGS = Settings(learning_rate=0.01, num_epochs=2, interval=1, rho=1.0, deterministic=True)


def made_up_data(count=48, batch_size=BATCH):
    rng = np.random.default_rng(0)
    images = rng.normal(size=(count, 32, 32, 3)).astype(np.float32)
    return ArrayData((images, rng.integers(0, 3, count)), (images[:8], rng.integers(0, 3, 8)), batch_size)


@pytest.fixture(scope="module")
def network():
    """A compiled chain of convolutions, its data, and a table in which memory differs and all times are equal."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((32, 32, 3))
    x = inputs
    for _ in range(6):
        x = keras.layers.Conv2D(24, 3, padding="same", activation="relu")(x)
    model = keras.Model(inputs, keras.layers.Dense(3)(keras.layers.GlobalAveragePooling2D()(x)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss)
    model.optimizer.build(model.trainable_variables)
    data = made_up_data()
    full = TrainStep(CompiledTask(model, *data.specs), model.optimizer, BATCH)
    attribution = attribute(full, model.trainable_variables)
    shapes = [tuple(model.trainable_variables[k].shape) for k in attribution.positions]
    table = replace(
        make_table(model, t_fw_ms=1.0),
        positions=attribution.positions,
        shapes=shapes,
        features_mb=attribution.features_mb,
        memory=step_memory(full, attribution.places, attribution.positions),
    )
    return model, data, table


def limits(table, head, batch_size=BATCH):
    """What the head alone takes, and all tensors, in MB."""
    needed_mb = table.memory.needed_mb(batch_size)
    return needed_mb[table.depth(head) - 1], needed_mb[-1]


def limited(table, head, share, batch_size=BATCH, **changes):
    """Settings with a limit of memory: 0 is what the head alone takes, 1 what all tensors take."""
    head_mb, full_mb = limits(table, head, batch_size)
    return replace(SETTINGS, memory=START_MB + head_mb + share * (full_mb - head_mb), deterministic=False, **changes)


def fitted(network, memory, scheme="elastic_training", rho=1.0, **more):
    """The callback after two epochs of `fit`, whose last batches are smaller."""
    model, data, table = network
    elastic = ElasticTraining(rho, 1, table, memory=memory, scheme=scheme, verbose=0, **more)
    images, labels, _ = data._train
    model.fit(images[:43], labels[:43], batch_size=BATCH, epochs=2, verbose=0, callbacks=[elastic])
    return elastic.history


@pytest.mark.parametrize("select", [select_tensors, select_upper_part])
def test_selections_grow_with_the_depth_and_stay_within_it(select, network):
    model, _, table = network
    head, counts = head_mask(model), []
    for max_depth in (2, 5, 9, len(table.names), None):
        mask = select(table, np.ones(len(head)), head, 1.0, max_depth=max_depth)
        assert table.depth(mask) == (max_depth or len(head)) and (mask | head == mask).all()
        counts.append(int(mask.sum()))
    assert counts == [2, 5, 9, len(head), len(head)]


@pytest.fixture
def start(monkeypatch):
    monkeypatch.setattr("elastic_trainer.system.memory_budget.resident_memory_mb", lambda: START_MB)


@pytest.mark.parametrize(("scheme", "unit"), [("elastic_training", "M"), ("elastic_training_upper_part", "G")])
def test_a_run_and_the_callback_predict_what_they_take_and_keep_to_a_limit(scheme, unit, network, start):
    model, data, table = network
    head_mb, full_mb = limits(table, head_mask(model))
    limit_mb, found = START_MB + (head_mb + full_mb) / 2, []
    for memory in (None, limit_mb):
        settings = replace(SETTINGS, memory=memory, feature_cache="off")
        trainer = Trainer(model, data, scheme, settings, table=table)
        trainer.run(until_step=1)
        summary = trainer.results()
        assert summary["memory_budget_mb"] == memory
        found.append((trainer.history.selection.mask.sum(), summary["predicted_memory_mb"]))
    (free, free_mb), (count, predicted_mb) = found
    assert count < free and predicted_mb < free_mb and predicted_mb <= limit_mb
    assert fitted(network, None, scheme).selection.memory_mb is None
    history = fitted(network, f"{limit_mb / {'M': 1, 'G': 1e3}[unit]}{unit}", scheme)
    assert history.step == 6 and len(history.selections) == 2
    assert history.selection.memory_mb <= limit_mb and not history.selection.mask.all()
    assert history.selection.mask.sum() == pytest.approx(count, abs=3)
    assert history.selection.memory_mb == pytest.approx(predicted_mb, rel=0.15)


@pytest.mark.parametrize("scheme", ["elastic_training", "elastic_training_upper_part"])
def test_features_that_do_not_fit_are_given_up_before_tensors(scheme, network, start):
    model, _, table = network
    data = made_up_data(count=480)
    settings = replace(SETTINGS, rho=0.6, interval=40, num_epochs=40, feature_cache="float32")
    limit_mb = 1.02 * (START_MB + limits(table, head_mask(model))[1])
    for memory in (None, limit_mb):
        trainer = Trainer(model, data, scheme, replace(settings, memory=memory), table=table)
        trainer.run(until_step=1)
        selection = trainer.history.selection
        assert (trainer.training.features.split is not None) == (memory is None) == selection.uses_features
    assert selection.mask.sum() > head_mask(model).sum() and (selection.memory_mb or 0.0) <= limit_mb


def test_importance_in_parts_of_a_batch_is_that_of_the_batch(network):
    model, data, _ = network
    task, batches = CompiledTask(model, *data.specs), data.importance_batches(0, 2)
    whole, parts = ImportanceEvaluator(task, BATCH), ImportanceEvaluator(task, BATCH)
    parts.rows = 4
    for count in (1, 2):
        found, expected = (one.importance(model.optimizer, batches[:count]) for one in (parts, whole))
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)


def test_the_upper_part_is_not_refused_for_the_memory_that_measuring_takes(network, start):
    model, _, table = network
    data, settings = made_up_data(count=8, batch_size=1), limited(table, head_mask(model), 0.3, batch_size=1)
    with pytest.raises(UserError, match=r"even with one image at a time.* elastic_training_upper_part, which measures"):
        Trainer(model, data, "elastic_training", settings, table=table).run()
    trainer = Trainer(model, data, "elastic_training_upper_part", settings, table=table)
    trainer.run()
    assert len(trainer.history.selections) == 2 and trainer.history.selection.slowdown == 1.0


def test_the_plan_has_a_row_for_each_rho_and_marks_the_runs(network):
    model, data, table = network

    def rows(others=COMPARED_RHOS, **changed):
        settings = replace(SETTINGS, **changed)
        memory = MemoryBudget(settings.memory)
        return [*run_plan(table, head_mask(model), data, settings, memory, 0.55, others)]

    lines = rows()
    assert lines[0].startswith("plan: 2 epochs of 3 steps, 16 images each") and "no limit" in lines[0]
    [chosen] = [line for line in lines if line.startswith("→")]
    assert chosen.split()[1] == "0.55" and len(lines) == 2 + 1 + len(COMPARED_RHOS)
    assert f"{len(head_mask(model))} of  {len(head_mask(model))}" in lines[-1], "full training"
    assert rows(others=()) == [*lines[:2], chosen]
    assert rows(num_epochs=1)[0].startswith("plan: 1 epoch of 3 steps, ")
    from_features = rows(others=(), num_epochs=9, interval=9, feature_cache="float32")
    assert " 6 MB " in from_features[2], "of 48 examples, and 8 to test"
    head_mb, _ = limits(table, head_mask(model))
    assert all("not feasible" in line for line in rows(memory=head_mb)[2:])


def test_the_plan_has_fewer_views_of_each_example_where_memory_is_little(network, start, monkeypatch):
    model, data, table = network
    settings = replace(SETTINGS, num_epochs=9, interval=9, feature_cache="float32")
    monkeypatch.setattr(data, "view_count", 8)

    def megabytes(limit_mb=None):
        lines = run_plan(table, head_mask(model), data, settings, MemoryBudget(limit_mb), 0.55, ())
        return [float(one) for one in re.findall(r"(\d+) MB", [*lines][2].replace(",", ""))]

    features_mb, needed_mb = megabytes()
    assert features_mb == pytest.approx(6 * (8 * 48 + 8) / (48 + 8), rel=0.1), "6 MB are those of one view"
    fewer_mb, limited_mb = megabytes(needed_mb - 20)
    assert 0 < fewer_mb < features_mb - 20 and limited_mb <= needed_mb - 20, "further views take half of what is left"


def test_a_limit_makes_main_train_less_or_refuse(tmp_path):
    """Digits by main.py, without a limit, and with one. How near the peak is to what was predicted depends on what else
    the machine does (docs/log/memory.md)."""
    words = ("main.py", *NETWORK, "--batch_size", 32, "--input_size", 128, "--max_steps", 6, "--rho", 0.7)
    words += ("--logdir", tmp_path, "--train_type", "elastic_training_upper_part")
    done = command(*words, "--run_name", "free")
    assert not done.returncode, done.stderr
    free = json.loads((tmp_path / "free" / "summary.json").read_text())
    assert 0.5 < free["predicted_memory_mb"] / free["peak_memory_mb"] < 1.5
    free_mb = free["predicted_memory_mb"]
    limit_mb = round(free_mb - 20)
    done = command(*words, "--run_name", "limited", "--memory", f"{limit_mb}M")
    assert not done.returncode, done.stderr
    summary = json.loads((tmp_path / "limited" / "summary.json").read_text())
    assert summary["predicted_memory_mb"] <= limit_mb == summary["memory_budget_mb"]
    refused = command(*words, "--memory", f"{0.6 * free_mb}M")
    [line] = refused.stderr.strip().splitlines()
    assert refused.returncode == 2 and "MB are available" in line


def test_a_resumed_run_keeps_to_its_limit_or_to_a_smaller_one(network, start):
    model, data, table = network
    head_mb, _ = limits(table, head_mask(model))
    settings = limited(table, head_mask(model), 0.7)
    first = Trainer(model, data, "elastic_training", settings, table=table)
    first.run(until_step=2)
    saved = first.state()
    second = Trainer(model, data, "elastic_training", settings, table=table)
    second.load(saved)
    second.run()
    assert second.results()["predicted_memory_mb"] <= settings.memory
    smaller = replace(settings, memory=START_MB + head_mb - 10)
    with pytest.raises(UserError, match="training the head alone takes"):
        Trainer(model, data, "elastic_training_upper_part", smaller, table=table).load(saved)


@pytest.mark.parametrize("scheme", ["full_training", "elastic_training_upper_part"])
def test_a_refusal_names_what_fits_and_that_does(scheme, network, start):
    model, data, table = network
    table = replace(table, memory=table.memory._replace(by_rows_mb=table.memory.by_rows_mb + 100))
    least_mb = limits(table, head_mask(model))[0]
    if scheme == "full_training":
        least_mb = limits(network[2], head_mask(model))[1]
    settings = replace(SETTINGS, memory=START_MB + 0.9 * least_mb)
    with pytest.raises(UserError) as error:
        Trainer(model, data, scheme, settings, table=table).run()
    assert "\n" not in str(error.value)
    fits = dict(re.findall(r"--(\w+) (\d+)", str(error.value).split("what fits: ")[1]))
    memory, rows, part = fits["memory"], fits["batch_size"], int(fits["micro_batch"])
    assert int(rows) < BATCH and float(memory) > START_MB + 0.9 * least_mb
    for run_data, changes in (
        (data, {"memory": float(memory)}),
        (made_up_data(batch_size=int(rows)), {}),
        (data, {"micro_batch": part}),
    ):
        Trainer(model, run_data, scheme, replace(settings, **changes), table=table).run(until_step=1)
    with pytest.raises(UserError) as error:  # in parts that are too large
        Trainer(model, data, scheme, replace(settings, micro_batch=2 * part), table=table).run()
    assert f"--micro_batch {part}" in str(error.value)


def test_the_callback_measures_importance_in_parts_of_batches_of_any_size(network, start):
    """With `importance_batches`, the last and smaller batch of the first epoch is among them."""
    model, _, table = network
    limit_mb = limited(table, head_mask(model), 0.7).memory
    history = fitted(network, limit_mb, importance_batches=3, deterministic=False)
    assert history.selection.slowdown == 1.0, "no pass over all tensors fits"
    assert history.selection.importance.any()


def test_limits_that_are_too_small_are_refused_by_the_callback_in_one_line(network, start):
    head_mb, _ = limits(network[2], head_mask(network[0]))
    with pytest.raises(UserError, match="training the head alone takes") as error:
        fitted(network, START_MB + head_mb - 20)
    assert "--" not in str(error.value) and "micro_batch" not in str(error.value), "fit has no parts"
