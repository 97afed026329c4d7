"""The training loop, and each scheme of `selection.named`."""

import gc
import weakref

import numpy as np
import pytest
from conftest import make_small_model, make_table
from small_networks import values
from small_runs import curve, rows_of, run

import train
from elastic_trainer.datasets.image_data import ImageData
from elastic_trainer.engine.features import Evaluation
from elastic_trainer.engine.step import TrainStep
from elastic_trainer.networks.tensors import tensor_names
from elastic_trainer.runs.summary import result_lines
from elastic_trainer.selection.budget import MAX_CARRY_OVER
from elastic_trainer.settings import Settings
from elastic_trainer.system.errors import UserError


def test_every_scheme_has_a_function_in_train(monkeypatch):
    monkeypatch.setattr(train, "train", lambda *given: given)
    assert len(train.SCHEMES) >= 10
    for name in train.SCHEMES:
        assert getattr(train, name)(1, 2, 3, 4, 5) == (name, 1, 2, 3, 4, 5)
    with pytest.raises(AttributeError, match="has no attribute 'magic_training'"):
        train.magic_training  # noqa: B018


@pytest.mark.parametrize(
    ("scheme", "trained"),
    [
        ("full_training", lambda name: True),
        ("traditional_tl_training", lambda name: name.startswith("head/")),
        ("last_layers_training", lambda name: name.startswith(("head/", "tail_bn/", "right/"))),
        ("bn_plus_bias_training", lambda name: name.startswith("head/") or name.endswith(("gamma", "beta", "bias"))),
    ],
)
def test_fixed_schemes_train_exactly_their_tensors(scheme, trained, tmp_path):
    model = make_small_model()
    names, before = tensor_names(model), values(model.trainable_variables)
    run(tmp_path, getattr(train, scheme), Settings(learning_rate=0.05, num_epochs=2, trained_layers=3), model)
    for name, variable, old in zip(names, model.trainable_variables, before, strict=True):
        assert (variable.numpy() != old).any() == trained(name), name


def test_elastic_training_selects_every_interval_and_records_it(tmp_path):
    model = make_small_model()
    table = make_table(model)
    settings = Settings(learning_rate=0.05, num_epochs=5, interval=2, rho=0.6, deterministic=True)
    before = values(model.trainable_variables)
    model, summary = run(tmp_path, train.elastic_training, settings, model, table=table)
    rows = rows_of(tmp_path / "selections.csv")
    names = tensor_names(model)
    assert [int(row["epoch"]) for row in rows[:: len(names)]] == [0, 2, 4]
    assert [row["name"] for row in rows[: len(names)]] == names
    left_over = 0.0
    for row in rows[:: len(names)]:
        rho = 0.6 + min(left_over, MAX_CARRY_OVER)
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
    parts = summary["selection_part_seconds"]
    assert min(parts.values()) > 0
    assert parts["importance"] + parts["solve"] + parts["trace"] <= summary["selection_seconds"]


@pytest.mark.parametrize("scheme", ["weight_magnitude", "grad_magnitude", "random"])
def test_schemes_of_other_importances_train_and_record_it(scheme, tmp_path):
    """The random one draws again at each selection, and repeats with the seed."""
    settings = Settings(learning_rate=0.05, num_epochs=3, interval=1, rho=0.6, deterministic=True)
    measured = []
    for name in ("first", "second")[: 1 + (scheme == "random")]:
        model = make_small_model()
        run(tmp_path / name, getattr(train, f"elastic_training_{scheme}"), settings, model, table=make_table(model))
        rows = rows_of(tmp_path / name / "selections.csv")
        assert any(row["chosen"] == "1" and not row["name"].startswith("head/") for row in rows)
        measured.append(np.array([float(row["importance"]) for row in rows]).reshape(3, -1))
        assert measured[-1].min() >= 0 and measured[-1].max() == 1
    np.testing.assert_array_equal(measured[0], measured[-1])
    if scheme == "random":
        assert abs(np.corrcoef(measured[0])[np.triu_indices(3, 1)]).max() < 0.95


def test_upper_part_scheme_trains_all_tensors_down_to_a_depth(tmp_path):
    model = make_small_model()
    settings = Settings(learning_rate=0.05, num_epochs=2, interval=1, rho=0.6, deterministic=True)
    table = make_table(model)
    run(tmp_path, train.elastic_training_upper_part, settings, model, table=table)
    rows = rows_of(tmp_path / "selections.csv")
    assert {row["importance"] for row in rows} == {""}  # none is measured
    chosen = np.array([row["chosen"] == "1" for row in rows]).reshape(2, -1)
    for mask in chosen:
        depth = table.depth(mask)
        assert mask.sum() == depth and 2 < depth < len(mask)
        deeper = mask.copy()
        deeper[table.positions[depth]] = True
        assert table.predict_ms(mask) <= (0.6 + MAX_CARRY_OVER) * table.full_step_ms < table.predict_ms(deeper) + 2


@pytest.mark.parametrize(("guessing", "count"), [(0.5, 1), (9.0, 0)])
def test_training_loss_above_that_of_guessing_is_reported_once(guessing, count, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(ImageData, "guessing_loss", guessing)
    run(tmp_path, train.traditional_tl_training, Settings(learning_rate=1e-6, num_epochs=3))
    line = f"; class frequencies alone give {guessing:.2f}; train longer if it is falling, else try another --learning"
    assert capsys.readouterr().out.count(line) == count


def test_best_model_is_that_of_the_start_if_no_epoch_is_better(tmp_path, monkeypatch):
    from elastic_trainer.networks.saved_model import load_model

    model, accuracies = make_small_model(), iter([0.9, 0.5, 0.4])
    start = values(model.variables)
    monkeypatch.setattr(Evaluation, "__call__", lambda *_: {"loss": 1.0, "accuracy": next(accuracies)})
    settings = Settings(learning_rate=0.05, num_epochs=2, save_model=True)
    _, summary = run(tmp_path, train.full_training, settings, model)
    assert (summary["start_accuracy"], summary["best_accuracy"], summary["best_epoch"]) == (0.9, 0.9, 0)
    for kept, before in zip(load_model(tmp_path / "best.keras", "--evaluate").variables, start, strict=True):
        np.testing.assert_array_equal(kept.numpy(), before)
    assert "90.0% with the model that training started from" in result_lines(summary, tmp_path)[0]
    rows = rows_of(tmp_path / "metrics.csv")
    assert [(row["epoch"], row["step"], row["test_accuracy"], row["train_loss"] == "") for row in rows] == [
        ("0", "0", "0.9", True),
        ("1", "6", "0.5", False),
        ("2", "12", "0.4", False),
    ]
    points = curve(tmp_path, "test/accuracy")
    assert [value for _, value in points] == pytest.approx([0.9, 0.5, 0.4])
    assert [step for step, _ in points] == [0, 6, 12]


def test_half_precision_trains_only_the_selected_float32_weights(half_precision, small_data, tmp_path):
    model = make_small_model()
    settings = Settings(learning_rate=0.02, num_epochs=3, interval=1, rho=0.6, deterministic=True)
    names, before = tensor_names(model), values(model.trainable_variables)
    run(tmp_path, train.elastic_training, settings, model, table=make_table(model))
    rows = rows_of(tmp_path / "selections.csv")
    ever = {row["name"] for row in rows if row["chosen"] == "1"}
    for name, variable, old in zip(names, model.trainable_variables, before, strict=True):
        assert variable.dtype == "float32" and (variable.numpy() != old).any() == (name in ever), name
    importances = {float(row["importance"]) for row in rows}
    assert len(importances) > 10 and all(np.isfinite(one) for one in importances)
    assert model.get_layer("stem").compute_dtype == half_precision.removeprefix("mixed_")


def test_max_steps_ends_the_run_within_an_epoch_and_the_rate_reaches_zero_after_it(tmp_path):
    _, summary = run(tmp_path, train.full_training, Settings(learning_rate=0.1, num_epochs=5, max_steps=8))
    assert (summary["steps"], summary["epochs"]) == (8, 2)
    rates = [float(row["learning_rate"]) for row in rows_of(tmp_path / "metrics.csv")]
    assert rates == pytest.approx([0.05 * (1 + np.cos(np.pi * step / 8)) for step in (5, 7)], rel=1e-4)


def test_a_loss_that_is_not_finite_ends_the_run_with_what_may_be_the_cause(tmp_path):
    model = make_small_model()
    model.get_layer("head").bias.assign([np.nan, 0, 0])
    with pytest.raises(UserError, match=r"nan at step 1 with learning rate \S+; lower .*, or check --weights"):
        run(tmp_path, train.full_training, Settings(learning_rate=1e-3), model)


def test_graphs_of_earlier_selections_are_released(tmp_path, monkeypatch):
    model = make_small_model()
    graphs: list[weakref.ref] = []
    alive: list[int] = []  # earlier graphs that exist when a new one is made
    original = TrainStep.__init__

    def recording(self, *args, **more):
        alive.append(sum(graph() is not None for graph in graphs))
        original(self, *args, **more)
        graphs.append(weakref.ref(self.graph))

    monkeypatch.setattr(TrainStep, "__init__", recording)
    settings = Settings(num_epochs=8, interval=1, rho=0.6, deterministic=True)
    run(tmp_path, train.elastic_training_random, settings, model, table=make_table(model))
    for _ in range(3):  # TensorFlow's finalizers may need more than one collection
        gc.collect()
    assert len(graphs) > 4 and not any(alive) and not any(graph() for graph in graphs)


def test_elastic_training_maps_the_published_arguments():
    published = ("model_name", "ds_train, ds_test", "timing_info", "interval, rho", "save_model", "save_txt")
    assert all(f"| {name} " in (train.elastic_training.__doc__ or "") for name in published)
