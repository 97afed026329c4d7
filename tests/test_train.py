"""Training: exactly the selected tensors move, measuring importance leaves no trace, the budget is kept."""

import csv
import gc
import json
import resource
import weakref
from pathlib import Path

import keras
import numpy as np
import pytest
from conftest import BATCH, make_small_data, make_small_model, make_table
from small_runs import run

import train
from elastic_trainer.networks.tensors import head_mask, tensor_names
from elastic_trainer.selection.importance import GradientMagnitude, ImportanceEvaluator, WeightMagnitude
from elastic_trainer.selection.schedule import Schedule
from elastic_trainer.selection.schemes import Scheme
from elastic_trainer.selection.select import Selection, select_tensors
from elastic_trainer.selection.time_budget import CARRIED, RhoBudget
from elastic_trainer.settings import Settings
from elastic_trainer.training.optimizers import make_optimizer
from elastic_trainer.training.step import TrainStep, classification_loss, forward_pass
from utils import UserError


def built_optimizer(name, model, rate=1e-2, decay=0.1):
    optimizer = make_optimizer(name, rate, decay, 100)
    optimizer.build(model.trainable_variables)
    return optimizer


def slots_of(optimizer, count):
    """Slot variables of each trained variable: [count] lists."""
    slots = [v for v in optimizer.variables if len(v.shape)]  # the step count and the rate are scalars
    assert len(slots) % count == 0
    kinds: dict[str, list] = {"momentum": [], "velocity": []}
    for slot in slots:
        kinds["velocity" if slot.path.endswith("velocity") else "momentum"].append(slot)
    return [[group[k] for group in kinds.values() if group] for k in range(count)]


def values(variables):
    return [v.numpy().copy() for v in variables]


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_exactly_the_selected_variables_and_their_slots_move_over_three_reselections(name, small_model, small_data):
    variables = small_model.trainable_variables
    count = len(variables)
    optimizer = built_optimizer(name, small_model)
    slots = slots_of(optimizer, count)
    statistics = [v for v in small_model.variables if v.name in ("moving_mean", "moving_variance")]
    frozen = values(statistics)
    rng = np.random.default_rng(0)
    masks = [rng.random(count) < 0.5 for _ in range(4)]
    masks[0][:] = False
    masks[0][-2:] = True  # the head alone
    batches = list(small_data.train(0))
    for mask in masks:
        step = TrainStep(small_model, optimizer, BATCH, mask)
        for images, labels in batches[:2]:
            before, slots_before = values(variables), [values(own) for own in slots]
            step(images, labels)
            for k in range(count):
                moved = (variables[k].numpy() != before[k]).any()
                assert moved == mask[k], f"{variables[k].path} moved: {moved}"
                for slot, old in zip(slots[k], slots_before[k], strict=True):
                    assert (slot.numpy() != old).any() == mask[k], f"slot {slot.path}"
    assert int(optimizer.iterations) == 2 * len(masks)
    for variable, old in zip(statistics, frozen, strict=True):
        np.testing.assert_array_equal(variable.numpy(), old)


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_measuring_importance_leaves_everything_as_it_was(name, small_model, small_data):
    optimizer = built_optimizer(name, small_model)
    step = TrainStep(small_model, optimizer, BATCH)
    for images, labels in small_data.train(0):
        step(images, labels)
    everything = [*small_model.variables, *optimizer.variables]
    assert any("seed" in v.path for v in everything)
    before = values(everything)
    evaluator = ImportanceEvaluator(small_model, BATCH)
    evaluator(optimizer, small_data.importance_batches(0))
    for variable, old in zip(everything, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), old, err_msg=variable.path)
    [(images, labels)] = small_data.importance_batches(1)
    step(images, labels)
    assert any((v.numpy() != old).any() for v, old in zip(everything, before, strict=True))


def test_importance_is_the_first_order_loss_reduction_of_the_update(small_data):
    """Against the definition, computed with eager TensorFlow and plain arithmetic (no momentum yet, so dw = -lr·g)."""
    import tensorflow as tf

    model = make_small_model()
    for layer in model.layers:
        if isinstance(layer, keras.layers.Dropout):
            layer.rate = 0.0
    rate, decay = 0.05, 0.1
    optimizer = built_optimizer("sgd", model, rate, decay)
    [(images, labels)] = small_data.importance_batches(0)

    def gradients():
        with tf.GradientTape() as tape:
            loss = classification_loss(labels, model(images, training=True))
        return loss, tape.gradient(loss, [v.value for v in model.trainable_variables])

    measured = ImportanceEvaluator(model, BATCH)(optimizer, [(images, labels)])
    loss_before, first = gradients()
    start = values(model.trainable_variables)
    for variable, gradient in zip(model.trainable_variables, first, strict=True):
        variable.assign(variable.numpy() * (1 - rate * decay) - rate * gradient.numpy())
    loss_after, second = gradients()
    expected = np.array(
        [-np.sum(g.numpy() * (v.numpy() - w)) for g, v, w in zip(second, model.trainable_variables, start, strict=True)]
    )
    np.testing.assert_allclose(measured, expected / np.abs(expected).max(), rtol=1e-3, atol=1e-6)
    assert np.abs(measured).max() == pytest.approx(1.0)
    assert loss_after < loss_before and expected.sum() > 0


@pytest.mark.parametrize(("evaluator", "of"), [(WeightMagnitude, "weights"), (GradientMagnitude, "gradients")])
def test_the_other_importances_are_sums_of_magnitudes(evaluator, of, small_model, small_data):
    import tensorflow as tf

    optimizer = built_optimizer("sgd", small_model)
    [(images, labels)] = small_data.importance_batches(0)
    everything = [*small_model.variables, *optimizer.variables]
    before = values(everything)
    measured = evaluator(small_model, BATCH)(optimizer, [(images, labels)])
    for variable, old in zip(everything, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), old, err_msg=variable.path)
    expected = values(small_model.trainable_variables)
    if of == "gradients":
        with tf.GradientTape() as tape:
            loss = classification_loss(labels, small_model(images, training=True))
        expected = [g.numpy() for g in tape.gradient(loss, [v.value for v in small_model.trainable_variables])]
    sums = np.array([np.abs(array).sum() for array in expected])
    np.testing.assert_allclose(measured, sums / sums.max(), rtol=1e-4, atol=1e-7)


def test_importance_over_several_batches_is_their_mean(small_model, small_data):
    optimizer = built_optimizer("adam", small_model)
    evaluator = ImportanceEvaluator(small_model, BATCH)
    batches = small_data.importance_batches(0, 3)
    assert len(batches) == 3 and (batches[0][0].numpy() != batches[1][0].numpy()).any()
    np.testing.assert_array_equal(batches[0][0], small_data.importance_batches(0)[0][0])
    single = [np.array([float(one) for one in evaluator._measure(optimizer, *batch)]) for batch in batches]
    mean = np.mean(single, axis=0)
    np.testing.assert_allclose(evaluator(optimizer, batches), mean / np.abs(mean).max(), rtol=1e-4, atol=1e-7)


def test_timing_gradient_passes_leaves_the_random_state_alone(small_model, small_data):
    before = values(small_model.variables)
    [(images, labels)] = small_data.importance_batches(0)
    assert ImportanceEvaluator(small_model, BATCH).pass_ms(images, labels) > 0
    for variable, old in zip(small_model.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), old, err_msg=variable.path)


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_a_tensor_that_comes_back_goes_on_with_what_it_had(name, small_model, small_data):
    """Its momentum waits unchanged, and Adam's bias correction counts its own steps: the update is that of a tensor
    that was never away, at the rate that the schedule has now."""
    variables = small_model.trainable_variables
    alone = np.zeros(len(variables), bool)
    alone[0] = True
    others = ~alone
    optimizer = built_optimizer(name, small_model)
    batches = list(small_data.train(0))
    for mask in (alone, others):
        step = TrainStep(small_model, optimizer, BATCH, mask)
        for images, labels in batches[:3]:
            step(images, labels)
    slots = [slot.numpy() for slot in slots_of(optimizer, len(variables))[0]]
    before, rate = variables[0].numpy(), float(optimizer.learning_rate)
    step = TrainStep(small_model, optimizer, BATCH, alone)
    step(*batches[3])
    if name == "sgd":
        momentum = slots_of(optimizer, len(variables))[0][0].numpy()
        gradient = (0.9 * slots[0] - momentum) / rate  # what the update must have been made of
        assert np.abs(gradient).max() > 0
        np.testing.assert_allclose(variables[0].numpy(), before * (1 - rate * 0.1) + momentum, rtol=1e-4, atol=1e-7)
        assert rate == pytest.approx(0.5e-2 * (1 + np.cos(np.pi * 6 / 100)), rel=1e-4)
    else:
        mean, square = (slot.numpy() for slot in slots_of(optimizer, len(variables))[0])
        corrected = mean / (1 - 0.9**4) / (np.sqrt(square / (1 - 0.999**4)) + 1e-7)  # its 4th step, the run's 7th
        np.testing.assert_allclose(variables[0].numpy(), before - rate * corrected, rtol=1e-3, atol=1e-6)


def test_what_a_models_regularisers_add_belongs_to_the_loss(small_data):
    [(images, labels)] = small_data.importance_batches(0)
    inputs = keras.Input(images.shape[1:])
    penalised = keras.layers.Dense(3, kernel_regularizer=keras.regularizers.L2(0.5), name="head")
    model = keras.Model(inputs, penalised(keras.layers.Flatten()(keras.layers.Rescaling(1 / 255)(inputs))))
    kernel = model.get_layer("head").kernel.numpy()
    expected = float(classification_loss(labels, model(images))) + 0.5 * np.sum(kernel**2)
    step = TrainStep(model, built_optimizer("sgd", model, rate=1e-3, decay=0.0), BATCH)
    assert step(images, labels)[0] == pytest.approx(expected, rel=1e-5)
    assert forward_pass(model, BATCH)(images, labels) < expected


def test_importance_that_is_not_finite_is_refused(small_model, small_data):
    optimizer = built_optimizer("sgd", small_model)
    small_model.get_layer("head").bias.assign([np.nan, 0, 0])
    with pytest.raises(UserError, match=r"importance is not finite.*lower --learning_rate"):
        ImportanceEvaluator(small_model, BATCH)(optimizer, small_data.importance_batches(0))


def test_selection_keeps_the_budget_and_always_has_the_head(small_model):
    table, head = make_table(small_model), head_mask(small_model)
    rng = np.random.default_rng(0)
    smallest = table.predict_ms(head) / table.full_step_ms
    for rho in np.linspace(smallest, 1, 20):
        importance = rng.normal(0.2, 0.5, len(head))
        choice = select_tensors(table, importance, head, float(rho))
        assert choice.mask[head].all()
        assert choice.predicted_step_ms == pytest.approx(table.predict_ms(choice.mask))
        assert choice.predicted_step_ms is not None and choice.budget_step_ms is not None
        assert choice.predicted_step_ms <= choice.budget_step_ms + 1e-9
        assert not (choice.mask & ~head & (importance <= 0)).any()
    everything = select_tensors(table, np.ones(len(head)), head, 1.0)
    assert everything.mask.all()


def test_a_rho_below_the_head_names_the_smallest_feasible_one(small_model):
    table, head = make_table(small_model, constant_ms=20.0), head_mask(small_model)
    smallest = table.predict_ms(head) / table.full_step_ms
    with pytest.raises(UserError, match=r"--rho 0.1: .* give at least (0\.\d+)") as caught:
        RhoBudget(table, head, 0.1)
    suggested = float(str(caught.value).rsplit(" ", 1)[1])
    assert smallest <= suggested < smallest + 0.0011
    RhoBudget(table, head, suggested)


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("scheme", "trained"),
    [
        ("full_training", lambda name: True),
        ("traditional_tl_training", lambda name: name.startswith("head/")),
        ("last_layers_training", lambda name: name.startswith(("head/", "tail_bn/", "right/"))),
        ("bn_plus_bias_training", lambda name: name.startswith("head/") or name.endswith(("gamma", "beta", "bias"))),
    ],
)
def test_fixed_schemes_train_what_they_say(scheme, trained, tmp_path):
    model = make_small_model()
    names, before = tensor_names(model), values(model.trainable_variables)
    run(tmp_path, getattr(train, scheme), Settings(learning_rate=0.05, num_epochs=2, trained_layers=3), model)
    for name, variable, old in zip(names, model.trainable_variables, before, strict=True):
        assert (variable.numpy() != old).any() == trained(name), name


def test_elastic_training_reselects_every_interval_and_records_it(tmp_path):
    model = make_small_model()
    table = make_table(model)
    settings = Settings(learning_rate=0.05, num_epochs=5, interval=2, rho=0.6, correct_budget=False)
    before = values(model.trainable_variables)
    model, summary = run(tmp_path, train.elastic_training, settings, model, table=table)
    rows = rows_of(tmp_path / "selections.csv")
    names = tensor_names(model)
    assert [int(row["epoch"]) for row in rows[:: len(names)]] == [0, 2, 4]
    assert [row["name"] for row in rows[: len(names)]] == names
    left_over = 0.0
    for row in rows[:: len(names)]:
        rho = 0.6 + min(left_over, CARRIED)
        assert float(row["rho"]) == pytest.approx(rho)
        assert float(row["budget_step_ms"]) == pytest.approx(rho * table.full_step_ms)
        assert float(row["predicted_step_ms"]) <= rho * table.full_step_ms + 1e-9
        left_over = rho - float(row["predicted_step_ms"]) / table.full_step_ms
    for row in rows:
        assert float(row["measured_step_ms"]) > 0
        assert (row["slowdown"], row["correction"]) == ("1.0", "1.0")
        assert row["chosen"] == "1" or not row["name"].startswith("head/")
    ever = {row["name"] for row in rows if row["chosen"] == "1"}
    assert 2 < len(ever) < len(names)
    for name, variable, old in zip(names, model.trainable_variables, before, strict=True):
        assert (variable.numpy() != old).any() == (name in ever), name
    importances = [abs(float(row["importance"])) for row in rows[: len(names)]]
    assert max(importances) == pytest.approx(1)
    assert summary["selection_seconds"] < summary["train_seconds"]


@pytest.mark.parametrize(("interval", "steps"), [(0.5, [0, 3, 6, 9]), (1 / 6, range(12)), (0.4, [0, 3, 5, 8, 10])])
def test_selections_may_come_several_times_an_epoch(interval, steps, tmp_path):
    settings = Settings(learning_rate=0.05, num_epochs=2, interval=interval, rho=0.6, correct_budget=False)
    model = make_small_model()
    run(tmp_path, train.elastic_training, settings, model, table=make_table(model))
    rows = rows_of(tmp_path / "selections.csv")[:: len(tensor_names(model))]
    assert [int(row["step"]) for row in rows] == list(steps)
    assert [float(row["epoch"]) for row in rows] == pytest.approx([step / 6 for step in steps], abs=1e-4)


def test_an_interval_of_less_than_a_step_is_refused():
    data = make_small_data()
    with pytest.raises(UserError, match=r"--interval 0.1: is less than a step; .* give at least (0\.\d+)") as caught:
        Schedule.of(Settings(), data.steps_per_epoch).selection_steps(0.1)
    smallest = float(str(caught.value).rsplit(" ", 1)[1])
    schedule = Schedule.of(Settings(num_epochs=2), data.steps_per_epoch)
    assert schedule.selection_steps(smallest)[:3] == [0, 2, 3]


@pytest.mark.parametrize("scheme", ["elastic_training_weight_magnitude", "elastic_training_grad_magnitude"])
def test_the_other_elastic_schemes_run_and_record_their_importance(scheme, tmp_path):
    model = make_small_model()
    settings = Settings(learning_rate=0.05, num_epochs=2, interval=1, rho=0.6, correct_budget=False)
    run(tmp_path, getattr(train, scheme), settings, model, table=make_table(model))
    rows = rows_of(tmp_path / "selections.csv")
    assert all(0 <= float(row["importance"]) <= 1 for row in rows)
    assert any(row["chosen"] == "1" and not row["name"].startswith("head/") for row in rows)


@pytest.fixture(params=["mixed_bfloat16", "mixed_float16"])
def half_precision(request):
    keras.config.set_dtype_policy(request.param)
    yield request.param
    keras.config.set_dtype_policy("float32")


def test_half_precision_trains_float32_weights_and_only_those_selected(half_precision, small_data, tmp_path):
    model = make_small_model()
    settings = Settings(learning_rate=0.02, num_epochs=3, interval=1, rho=0.6, correct_budget=False)
    names, before = tensor_names(model), values(model.trainable_variables)
    run(tmp_path, train.elastic_training, settings, model, table=make_table(model))
    rows = rows_of(tmp_path / "selections.csv")
    ever = {row["name"] for row in rows if row["chosen"] == "1"}
    for name, variable, old in zip(names, model.trainable_variables, before, strict=True):
        assert variable.dtype == "float32" and (variable.numpy() != old).any() == (name in ever), name
    importances = {float(row["importance"]) for row in rows}
    assert len(importances) > 10 and all(np.isfinite(one) for one in importances)
    assert model.get_layer("stem").compute_dtype == half_precision.removeprefix("mixed_")


def test_half_precision_computes_what_float32_does_but_for_its_rounding(half_precision, small_data):
    results = []
    for policy in (half_precision, "float32"):
        keras.config.set_dtype_policy(policy)
        model = make_small_model()
        next(layer for layer in model.layers if isinstance(layer, keras.layers.Dropout)).rate = 0.0
        optimizer = built_optimizer("sgd", model, rate=1e-2)
        start = values(model.trainable_variables)
        loss = TrainStep(model, optimizer, BATCH)(*next(iter(small_data.train(0))))[0]
        changes = [v.numpy() - old for v, old in zip(model.trainable_variables, start, strict=True)]
        results.append((loss, np.concatenate([one.ravel() for one in changes])))
    (loss, moved), (single_loss, single_moved) = results
    assert loss == pytest.approx(single_loss, rel=0.03)
    cosine = moved @ single_moved / np.linalg.norm(moved) / np.linalg.norm(single_moved)
    assert cosine > 0.97 and np.linalg.norm(moved) == pytest.approx(np.linalg.norm(single_moved), rel=0.1)


def test_a_run_leaves_complete_records(tmp_path):
    settings = Settings(learning_rate=0.05, num_epochs=3, save_model=True)
    model, summary = run(tmp_path, train.full_training, settings)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    times = {"train_seconds", "validation_seconds", "selection_seconds", "median_step_ms"}
    results = {"epochs", "best_accuracy", "final_accuracy", "peak_memory_mb", "energy_joules"}
    assert times | results | {"model_name", "dataset_name", "train_type", "rho", "seed"} <= set(summary)
    epochs = rows_of(tmp_path / "metrics.csv")
    assert [int(row["epoch"]) for row in epochs] == [1, 2, 3]
    assert [int(row["step"]) for row in epochs] == [6, 12, 18]
    seconds = [float(row["train_seconds"]) for row in epochs]
    assert sorted(seconds) == seconds and seconds[-1] == pytest.approx(summary["train_seconds"])
    assert float(epochs[-1]["test_accuracy"]) == summary["final_accuracy"]
    assert max(float(row["test_accuracy"]) for row in epochs) == summary["best_accuracy"]
    assert "environment" in json.loads((tmp_path / "config.json").read_text())
    last = keras.models.load_model(tmp_path / "last.keras")
    [(images, _)] = make_small_data().importance_batches(0)
    np.testing.assert_allclose(last(images, training=False), model(images, training=False), rtol=1e-5)
    assert (tmp_path / "best.keras").is_file()
    assert not list(tmp_path.glob(".*"))


def test_tensorboard_gets_every_curve(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model = make_small_model()
    settings = Settings(learning_rate=0.05, num_epochs=2, interval=1, rho=0.6)
    run(tmp_path, train.elastic_training, settings, model, table=make_table(model))
    events = EventAccumulator(str(tmp_path), size_guidance={"tensors": 0})
    events.Reload()
    tags = set(events.Tags()["tensors"])
    curves = {f"{split}/{what}" for split in ("train", "test") for what in ("loss", "accuracy")}
    over_time = {f"over_training_seconds/{curve.replace('/', '_')}" for curve in curves}
    others = {
        "budget/rho",
        "budget/slowdown",
        "budget/correction",
        "learning_rate",
        "step_time/measured_ms",
        "step_time/budget_ms",
        "selection/tensors_by_epoch",
    }
    assert curves | over_time | others <= tags
    assert [event.step for event in events.Tensors("test/accuracy")] == [6, 12]


def test_max_steps_ends_a_run_in_the_middle_of_an_epoch(tmp_path):
    _, summary = run(tmp_path, train.full_training, Settings(num_epochs=5, max_steps=8))
    assert (summary["steps"], summary["epochs"]) == (8, 2)


def test_the_schedule_ends_at_zero_with_the_last_step(tmp_path):
    run(tmp_path, train.full_training, Settings(learning_rate=0.1, num_epochs=2))
    rates = [float(row["learning_rate"]) for row in rows_of(tmp_path / "metrics.csv")]
    expected = [0.05 * (1 + np.cos(np.pi * step / 12)) for step in (5, 11)]
    assert rates == pytest.approx(expected, rel=1e-4)


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    model = make_small_model()
    model.get_layer("head").bias.assign([np.nan, 0, 0])
    with pytest.raises(UserError, match=r"the loss is nan at step 1 with learning rate 0.001; lower --learning_rate"):
        run(tmp_path, train.full_training, Settings(learning_rate=1e-3), model)


def test_two_runs_with_one_seed_choose_and_learn_alike(tmp_path):
    results = []
    for name in ("a", "b"):
        model = make_small_model()
        (tmp_path / name).mkdir()
        settings = Settings(learning_rate=0.05, num_epochs=3, interval=1, rho=0.6, correct_budget=False)
        run(tmp_path / name, train.elastic_training, settings, model, table=make_table(model))
        chosen = [row["chosen"] for row in rows_of(tmp_path / name / "selections.csv")]
        results.append((chosen, values(model.trainable_variables)))
    assert results[0][0] == results[1][0]
    for one, other in zip(results[0][1], results[1][1], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


class AlternatingScheme(Scheme):
    """A new random selection every epoch."""

    def is_due(self, step):
        return step % 6 == 0

    def __init__(self, count):
        self._count = count
        self._rng = np.random.default_rng(0)

    def select(self, progress, state):
        mask = self._rng.random(self._count) < 0.5
        mask[-1] = True
        return Selection(mask, epoch=progress.epoch)


def test_graphs_of_old_selections_are_released(tmp_path, monkeypatch):
    model = make_small_model()
    graphs: list[weakref.ref] = []
    alive: list[int] = []  # older graphs at the moment a new one is made
    original = TrainStep.__init__

    def remembering(self, *args):
        alive.append(sum(graph() is not None for graph in graphs))
        original(self, *args)
        graphs.append(weakref.ref(self.graph))

    monkeypatch.setattr(TrainStep, "__init__", remembering)
    scheme = AlternatingScheme(len(model.trainable_variables))
    settings = Settings(num_epochs=8)
    run(tmp_path, lambda m, d, s, log: train.run_training(m, d, scheme, s, log), settings, model)
    gc.collect()
    assert len(graphs) == 8 and alive == [0] * 8
    assert [graph() for graph in graphs] == [None] * 8


def test_memory_is_flat_over_30_reselections():
    """On a network large enough that keeping its graphs would show."""
    inputs = x = keras.Input((32, 32, 3))
    for _ in range(30):
        x = keras.layers.Conv2D(4, 1, activation="relu")(x)
    model = keras.Model(inputs, keras.layers.Dense(3)(keras.layers.GlobalAveragePooling2D()(x)))
    optimizer = built_optimizer("sgd", model)
    rng = np.random.default_rng(0)
    images = rng.uniform(0, 255, (BATCH, 32, 32, 3)).astype(np.float32)
    labels = np.array([0, 1, 2, 0], np.int32)
    used = []
    step = None
    for _ in range(36):
        step = None
        gc.collect()
        mask = rng.random(len(model.trainable_variables)) < 0.3
        step = TrainStep(model, optimizer, BATCH, mask)
        step(images, labels)
        used.append(resident_mb())
    assert step is not None
    grown = np.median(used[-3:]) - np.median(used[4:7])
    assert grown < 30, f"grew by {grown:.0f} MB over 30 re-selections: {np.round(used)}"


def resident_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6
