"""A small fleet in one process: round 0 is the head of all photos, boards train what they say, and the best is kept."""

import csv
from dataclasses import replace

import keras
import numpy as np
import pytest
from conftest import CLASSES, make_small_model, make_table
from fleets import NAMES, data, local, make_board, make_server, photos

from elastic_trainer.errors import UserError
from elastic_trainer.extensions.fleet.client import Made, round_trainer, sent_names, trained_names
from elastic_trainer.extensions.fleet.local import LocalLink
from elastic_trainer.extensions.fleet.parcel import Parcel
from elastic_trainer.extensions.fleet.roster import Answer, Member
from elastic_trainer.extensions.fleet.rounds import RoundBudget, RoundClock, RoundScheme
from elastic_trainer.extensions.fleet.server import accepted_replies, mean_of_tests, rate_of_round, usual_round_seconds
from elastic_trainer.memory.step_memory import MemoryPeaks
from elastic_trainer.networks.tensors import head_mask
from elastic_trainer.runs.config import network_record
from elastic_trainer.runs.reader import read_summary
from elastic_trainer.settings import Settings
from elastic_trainer.training.closed_form_head import SCALES, SHRINKAGES
from elastic_trainer.training.feature_sums import FeatureSums


def rows(path):
    with path.open(newline="") as file:
        return [*csv.DictReader(file)]


def hello():
    model = make_small_model(seed=1)
    arrays = {name: model.variables[int(name.removeprefix("model/"))].numpy() for name in sent_names(model)}
    return Parcel("hello", {"words": [], "class_names": [str(k) for k in range(CLASSES)]}, arrays), model


def train(arrays, seconds=0.3, rate=1e-4, changes="float32"):
    values = {"round": 1, "seconds": seconds, "rate": rate, "changes": changes, "tests": False}
    return Parcel("train", values, arrays)


def test_round_0_is_the_head_of_all_photos_together(tmp_path):
    boards = [make_board(0, classes=(0, 1)), make_board(1, classes=(2,)), make_board(2)]
    said: list[str] = []
    server = make_server(tmp_path, local(boards), said, data(7), boards=3, rounds=1)
    server.roster.wait_for(3)
    server._first_round()
    parts = [photos(24, place, classes) for place, classes in ((0, (0, 1)), (1, (2,)), (2, range(CLASSES)))]
    together = photos()._replace(
        images=np.concatenate([one.images for one in parts]), labels=np.concatenate([one.labels for one in parts])
    )
    # Which photos are held back differs, so shrinkage and scale may, too.
    features = features_of(make_small_model(seed=1), together)
    of_all = FeatureSums.of(features, together.labels, CLASSES)
    expected = [of_all.head(shrinkage, scale) for shrinkage in SHRINKAGES for scale in SCALES]
    kernel, bias = (server.weights[name] for name in server._trained[-2:])
    fits = [np.allclose(kernel, one.kernel, rtol=1e-3, atol=1e-5) for one in expected]
    assert sum(fits) == 1 and np.allclose(bias, expected[fits.index(True)].bias, rtol=1e-3)


def features_of(model, images):
    below = keras.Model(model.inputs, model.layers[-1].input)
    return below.predict(images.images.astype(np.float32), verbose=0)


def test_a_fleet_keeps_its_best_model_and_records_every_board(tmp_path):
    said: list[str] = []
    server = make_server(tmp_path, local([make_board(0), make_board(1, slowdown=3.0)]), said, data(7))
    before = dict(server.weights)
    server.run()
    summary = server._records.finish({"train_type": "elastic_training_upper_part"}, server.seconds)
    rounds, boards = rows(tmp_path / "metrics.csv"), rows(tmp_path / "boards.csv")
    assert [row["epoch"] for row in rounds] == ["0", "1", "2"] and [row["boards"] for row in rounds] == ["2", "2", "2"]
    assert {(row["round"], row["board"]) for row in boards} == {(r, name) for r in "12" for name in NAMES[:2]}
    assert float(summary["best_accuracy"]) == max(float(row["test_accuracy"]) for row in rounds)
    assert read_summary(tmp_path)["epochs"] == 3 and (tmp_path / "best.keras").is_file()
    assert any((before[name] != server.weights[name]).any() for name in before)
    chosen = rows(tmp_path / "selections.csv")
    assert len(chosen) == 4 * len(server._trained) and {row["board"] for row in chosen} == {*NAMES[:2]}
    for row in boards:
        own = [one for one in chosen if (one["epoch"], one["board"]) == (row["round"], row["board"])]
        assert sum(one["chosen"] == "1" for one in own) == int(row["trained_tensors"])


def test_without_photos_of_the_servers_the_boards_test_its_models(tmp_path):
    said: list[str] = []
    server = make_server(tmp_path, local([make_board(0), make_board(1)]), said, None)
    server.run()
    assert all(row["test_accuracy"] for row in rows(tmp_path / "metrics.csv"))


def test_a_fleet_goes_on_from_its_checkpoint(tmp_path):
    said: list[str] = []
    boards = [make_board(0), make_board(1)]
    first = make_server(tmp_path, local(boards), said, data(7), rounds=1)
    first.run()
    again = make_server(tmp_path, local(boards), said, data(7), rounds=2)
    again._resume(again._records.restore())
    for name, weight in first.weights.items():
        np.testing.assert_array_equal(weight, again.weights[name])
    again.run()
    assert "going on after round 1" in said and len(rows(tmp_path / "metrics.csv")) == 3


def test_a_board_replies_only_what_it_has_changed():
    greeting, model = hello()
    board = make_board(0)
    ready = board.handle(greeting)
    assert ready.values["images"] == 24 and 0 < ready.values["head_seconds"] < ready.values["full_seconds"]
    weights = {name: greeting.arrays[name] for name in trained_names(model)}
    reply = board.handle(train(weights))
    after = board._trainer.state().arrays
    for name, weight in weights.items():
        np.testing.assert_allclose(after[name], weight + reply.arrays.get(name, 0.0), rtol=1e-5, atol=1e-6)
    assert {*reply.arrays} <= {*weights} and any(change.any() for change in reply.arrays.values())
    assert reply.values["steps"] >= 1
    half = board.handle(train(weights, changes="float16"))
    assert {array.dtype.name for array in half.arrays.values()} == {"float16"}


def test_a_board_without_time_trains_its_head_and_with_time_everything():
    greeting, model = hello()
    board = make_board(0)
    board.handle(greeting)
    names = trained_names(model)
    weights = {name: greeting.arrays[name] for name in names}
    head = {name for name, is_head in zip(names, head_mask(model), strict=True) if is_head}
    assert {*board.handle(train(weights, 1e-4)).arrays} == head
    assert {*board.handle(train(weights, 5.0)).arrays} == {*names}


def test_measured_peaks_reach_what_a_board_predicts(small_model):
    details = {"memory_peaks": MemoryPeaks((1.0, 2.0), (501.0, 502.0))._asdict()}
    corrected, predicted_mb = replace(make_table(small_model), details=details), []
    for table in (make_table(small_model), corrected):
        made = Made(small_model, data(), table, Settings(weight_decay=0.0))
        budget = RoundBudget(table, head_mask(small_model), made.data.steps_per_epoch)
        trainer, _ = round_trainer(made, RoundScheme, budget, RoundClock())
        budget.seconds = 1.0
        trainer.run(1)
        predicted, start_mb = trainer.history.selection.memory_mb, trainer.training.start_mb
        assert predicted is not None and start_mb is not None
        predicted_mb.append(predicted - start_mb)
    assert predicted_mb[1] == pytest.approx(predicted_mb[0] + 500)


def test_a_round_ends_at_its_deadline():
    greeting, model = hello()
    board = make_board(0)
    board.handle(greeting)
    weights = {name: greeting.arrays[name] for name in trained_names(model)}
    board.handle(train(weights, 2.0))  # compiles
    reply = board.handle(train(weights, 2.0))
    assert 1.0 < reply.values["seconds"] < 3.0 and reply.values["steps"] > 10


def test_momentum_starts_at_0_and_the_step_stays_compiled():
    greeting, model = hello()
    board = make_board(0)
    board.handle(greeting)
    weights = {name: greeting.arrays[name] for name in trained_names(model)}
    board.handle(train(weights, 1.0))
    step = board._trainer.training._step
    board._load(weights)
    assert all(not slot.numpy().any() for slot in board._trainer.training.optimizer.momentums)
    board.handle(train(weights, 1.0))
    assert board._trainer.training._step is step


def test_a_round_lasts_as_long_as_the_fastest_board_needs_or_the_slowest_for_its_head():
    def board(images, image_ms):
        return {"images": images, "full_seconds": images * image_ms / 1e3, "head_seconds": images * image_ms / 4e3}

    boards = [board(100, 10.0), board(20, 20.0), board(300, 30.0)]
    mean = 140
    assert usual_round_seconds(boards) == pytest.approx(1.3 * mean * 0.010)
    assert usual_round_seconds([*boards, board(140, 1000.0)]) == pytest.approx(mean * 1.0 / 4 / 3)
    assert usual_round_seconds([board(100, 10.0)], passes=2.0) == pytest.approx(2.0)


def test_the_rate_rises_and_falls():
    rates = [rate_of_round(number, 8, 1.0) for number in range(1, 9)]
    assert rates[0] < 0.4 and rates[1] < 0.7 and max(rates) == rates[2] and rates[-1] < 0.05
    assert rate_of_round(1, 1, 1.0) == pytest.approx(0.5)


def test_a_board_that_knows_other_classes_or_tensors_is_left_out(tmp_path):
    said: list[str] = []
    link = LocalLink({1: make_board(0).handle, 2: _other_network})
    server = make_server(tmp_path, link, said, data(7), boards=1, rounds=1)
    server.run()
    assert len([line for line in said if "other tensors" in line]) == 1
    assert [row["boards"] for row in rows(tmp_path / "metrics.csv")] == ["1", "1"]


def _other_network(parcel):
    arrays = {name: array[..., :1] for name, array in parcel.arrays.items()}
    return make_board(1).handle(Parcel(parcel.kind, parcel.values, arrays))


def test_a_board_whose_copy_of_the_network_computes_something_else_is_left_out():
    parcel, model = hello()
    board = make_board(0)
    for record in (network_record(model), {**network_record(model), "inference": "other", "made_with": "before"}):
        parcel.values["network"] = record
        assert board.handle(parcel).kind == "ready"
    parcel.values["network"] = {**network_record(model), "inference": "other"}
    with pytest.raises(UserError, match="the server's network computes something else than this board's"):
        board.handle(parcel)


def test_numbers_that_cannot_be_are_one_line_and_no_error():
    member = Member(1, "odd", {"images": 5, "test_images": 5})
    odd = {"steps": float("inf"), "test": {"loss": 1.0, "accuracy": 0.5}, "test_images": float("inf")}
    answers, said = [Answer(member, 0, 0, Parcel("trained", odd), 0.0)], list[str]()
    assert accepted_replies({}, answers, said.append) == [] and "board odd is dropped" in said[0]
    assert mean_of_tests(answers) is None
