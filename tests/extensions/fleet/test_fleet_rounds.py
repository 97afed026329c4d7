"""A small fleet in one process: round 0 is the head of all photos, boards train what they say, and the best is kept."""

from dataclasses import replace

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import BATCH, CLASSES, make_small_model
from fleets import CLASS_NAMES, NAMES, data, hello, local, make_board, make_server, make_setup, photos, rows
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from elastic_trainer.datasets.image_data import ImageData
from elastic_trainer.errors import UserError
from elastic_trainer.extensions.fleet.board import Board, trained_names
from elastic_trainer.extensions.fleet.messages import About, Parcel, Result
from elastic_trainer.extensions.fleet.pace import rate_of_round, usual_round_seconds
from elastic_trainer.extensions.fleet.records import Records
from elastic_trainer.extensions.fleet.rounds import RoundClock, RoundOver
from elastic_trainer.extensions.fleet.simulated import LocalLink, SimulatedClock
from elastic_trainer.memory.budget import MemoryBudget
from elastic_trainer.memory.costs import MemoryCosts
from elastic_trainer.networks.saved_model import load_model
from elastic_trainer.networks.tensors import head_mask
from elastic_trainer.runs.config import network_record
from elastic_trainer.runs.reader import read_summary
from elastic_trainer.system_memory import resident_memory_mb
from elastic_trainer.training.feature_sums import SCALES, SHRINKAGES, FeatureSums


def train(weights, seconds=0.3, changes="float32"):
    values = {"round": 1, "seconds": seconds, "rate": 1e-4, "changes": changes}
    return Parcel("train", values, weights)


@pytest.fixture(scope="module")
def ready():
    """A board that knows the network of a server, its reply to that, the names of trainable tensors, their weights."""
    board = Board(NAMES[0], lambda *_: make_setup(), SimulatedClock(), say=lambda line: None)
    reply, model, arrays = hello(board)
    names = trained_names(model)
    return board, reply, names, {name: arrays[name] for name in names}


# --- a board ----------------------------------------------------------------------------------------------------------


def test_a_board_without_time_trains_its_head_and_with_time_everything(ready):
    board, reply, names, weights = ready
    assert reply.values["images"] == 24 and 0 < reply.values["head_seconds"] < reply.values["full_seconds"]
    head = {name for name, is_head in zip(names, head_mask(board.trainer.task.model), strict=True) if is_head}
    assert {*board.handle(train(weights, 1e-4)).arrays} == head
    assert {*board.handle(train(weights, 1.0)).arrays} == {*names}


def test_a_board_replies_what_it_has_changed(ready):
    board, _, names, weights = ready
    reply = board.handle(train(weights))
    after = board.trainer.state().arrays
    for name in names:
        np.testing.assert_allclose(after[name], weights[name] + reply.arrays.get(name, 0.0), rtol=1e-5, atol=1e-6)
    assert any(change.any() for change in reply.arrays.values()) and reply.values["steps"] >= 1
    half = board.handle(train(weights, changes="float16"))
    assert {array.dtype.name for array in half.arrays.values()} == {"float16"}


def test_a_round_ends_at_its_deadline_and_the_next_one_has_the_same_step_and_no_momentum(ready):
    board, _, _, weights = ready
    board.handle(train(weights, 0.3))  # compiles
    training = board.trainer.training
    graph = training.step_graph
    board.handle(Parcel("test", {}, weights))
    assert all(not slot.numpy().any() for slot in training.optimizer.momentums)
    reply = board.handle(train(weights, 0.3))
    assert reply.values["steps"] == int(300 / reply.values["predicted_step_ms"])
    assert training.step_graph is graph


def test_a_board_says_nothing_of_classes_that_it_lacks():
    board = Board(NAMES[0], lambda *_: make_setup(data(0, classes=(0, 2))), SimulatedClock(), say=lambda line: None)
    _, _, weights = hello(board)
    kernel, bias = [*board.handle(train(weights, 0.3)).arrays.values()][-2:]
    assert not bias[1].any() and not kernel[:, 1].any() and bias[0] and bias[2]


def test_a_round_is_over_where_another_step_would_end_after_its_deadline(monkeypatch):
    now, clock = [5.0], RoundClock()
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    clock.start(2.0)
    now[0] += 1.8
    clock._end_before(0.1)
    with pytest.raises(RoundOver):
        clock._end_before(0.2)
    assert clock.left == pytest.approx(0.2)
    clock.start(2.0, is_limit=False)
    clock._end_before(99.0)


def test_what_tensors_cost_in_memory_reaches_what_a_board_trains():
    trained = []
    for more_mb in (0.0, 500.0):
        setup = make_setup()
        count = len(setup.table.names)
        costs = MemoryCosts(0.0, 0.0, 0.0, own_mb=np.full(count, more_mb), chain_mb=np.zeros(count), kept=[])
        table = replace(setup.table, memory=costs)
        memory = MemoryBudget((resident_memory_mb() or 0.0) + 1800.0)
        setup = setup._replace(table=table, memory=memory)
        board = Board("a", lambda *_, setup=setup: setup, SimulatedClock(), say=lambda line: None)
        _, _, arrays = hello(board)
        board.handle(train(arrays, 1.0))
        trained.append(int(board.trainer.history.selection.mask.sum()))
    assert trained[1] <= 3 < trained[0]


def test_a_board_whose_copy_of_the_network_computes_something_else_is_left_out(ready):
    board, _, _, _ = ready
    _, model, arrays = hello(board)
    values, own = {"words": [], "class_names": [str(k) for k in range(CLASSES)]}, network_record(model)
    for record in (own, {**own, "inference": "other", "made_with": "before"}):
        assert board.handle(Parcel("hello", {**values, "network": record}, arrays)).kind == "ready"
    with pytest.raises(UserError, match="the server's network computes something else than this board's"):
        board.handle(Parcel("hello", {**values, "network": {**own, "inference": "other"}}, arrays))
    hello(board)


# --- the server -------------------------------------------------------------------------------------------------------


def test_round_0_is_the_head_of_all_photos_together(tmp_path):
    boards = [make_board(0, classes=(0, 1)), make_board(1, classes=(2,)), make_board(2)]
    server = make_server(tmp_path, local(boards), [], data(7), boards=3, rounds=0)
    server.run()
    parts = [photos(24, place, classes) for place, classes in ((0, (0, 1)), (1, (2,)), (2, range(CLASSES)))]
    images, labels = (np.concatenate([getattr(one, name) for one in parts]) for name in ("images", "labels"))
    model = make_small_model(seed=1)
    features = keras.Model(model.inputs, model.layers[-1].input).predict(images.astype(np.float32), verbose=0)
    # Which photos are held back differs, so shrinkage and scale may, too.
    of_all = FeatureSums.of(features, labels, CLASSES)
    expected = [of_all.head(shrinkage, scale) for shrinkage in SHRINKAGES for scale in SCALES]
    kernel, bias = (server.weights[name] for name in trained_names(model)[-2:])
    fits = [np.allclose(kernel, one.kernel, rtol=1e-3, atol=1e-5) for one in expected]
    assert sum(fits) == 1 and np.allclose(bias, expected[fits.index(True)].bias, rtol=1e-3)


def test_a_fleet_keeps_its_best_model_records_every_board_and_goes_on_from_its_checkpoint(tmp_path):
    said: list[str] = []
    boards = [make_board(0), make_board(1, slowdown=3.0)]
    first = make_server(tmp_path, local(boards), said, data(7), rounds=1)
    before = dict(first.weights)
    first.run()
    assert any((before[name] != first.weights[name]).any() for name in before)
    greeted: list[Parcel] = []

    def handle(parcel):
        greeted.append(parcel)
        return boards[0].handle(parcel)

    again = make_server(tmp_path, LocalLink({1: handle, 2: boards[1].handle}), said, data(7), rounds=2)
    again.run()
    assert "going on after round 1" in said
    for name, weight in first.weights.items():
        np.testing.assert_array_equal(weight, greeted[0].arrays[name])
    summary = again.records.finish(again.seconds)
    rounds, of_boards = rows(tmp_path / "metrics.csv"), rows(tmp_path / "boards.csv")
    assert [row["epoch"] for row in rounds] == ["0", "1", "2"] and [row["boards"] for row in rounds] == ["2", "2", "2"]
    assert {(row["round"], row["board"]) for row in of_boards} == {(r, name) for r in "12" for name in NAMES[:2]}
    assert float(summary["best_accuracy"]) == max(float(row["test_accuracy"]) for row in rounds)
    assert read_summary(tmp_path)["epochs"] == 3 and (tmp_path / "best.keras").is_file()
    chosen = rows(tmp_path / "selections.csv")
    assert len(chosen) == 4 * len(trained_names(make_small_model())) and {row["board"] for row in chosen} == {
        *NAMES[:2]
    }
    curve = EventAccumulator(str(tmp_path / "boards" / NAMES[1])).Reload().Tensors("board/steps")
    steps = [float(row["steps"]) for row in of_boards if row["board"] == NAMES[1]]
    assert [point.step for point in curve] == [1, 2], "both runs'"
    assert [float(tf.make_ndarray(point.tensor_proto)) for point in curve] == steps
    for row in of_boards:
        own = [one for one in chosen if (one["epoch"], one["board"]) == (row["round"], row["board"])]
        assert sum(one["chosen"] == "1" for one in own) == int(row["trained_tensors"])


class Spoiling(Board):
    """Replies with changes that make the head 0, and has no sums any more afterwards."""

    has_trained = False

    def handle(self, parcel):
        if parcel.kind == "sums" and self.has_trained:
            return Parcel("sums", {"none": "no sums"})
        reply = super().handle(parcel)
        if parcel.kind == "train":
            self.has_trained = True
            for name in [*reply.arrays][-2:]:  # kernel and bias of the head
                reply.arrays[name] = -parcel.arrays[name]
        return reply


@pytest.mark.parametrize("has_photos", [True, False])
def test_a_fleet_ends_with_its_best_model_after_a_resume_too(tmp_path, has_photos):
    board = Spoiling(NAMES[0], lambda *_: make_setup(data(0)), RoundClock(), say=lambda line: None)
    test = data(7) if has_photos else None
    for rounds in (1, 3):
        server = make_server(tmp_path, LocalLink({1: board.handle}), [], test, boards=1, rounds=rounds)
        server.run()
        best = load_model(tmp_path / "best.keras", "")
        for name in trained_names(best):
            np.testing.assert_array_equal(server.weights[name], best.variables[int(name[6:])].numpy())
    found = rows(tmp_path / "metrics.csv")
    assert [row["kept"] for row in found] == ["1", "0", "0", "0"]
    assert min(float(row["test_accuracy"]) for row in found[1:]) < float(found[0]["test_accuracy"])
    summary = server.records.finish(server.seconds)
    assert summary["final_accuracy"] == float(found[0]["test_accuracy"])


def test_after_the_last_round_the_head_is_in_closed_form_but_of_classes_that_no_board_has_any_more(tmp_path):
    """The second board, which alone has the third class, answers nothing once it has trained."""
    boards = [make_board(0, classes=(0, 1)), Spoiling(NAMES[1], lambda *_: make_setup(data(1)), RoundClock(), print)]
    server = make_server(tmp_path, local(boards), [], data(7), boards=2, rounds=1, round_seconds=0.1)
    trained = list[np.ndarray]()
    set_head = server._set_head

    def noted(head, keeps=False):
        trained.append(server.weights[trained_names(server._model)[-2]])
        set_head(head, keeps)
        trained.append(server.weights[trained_names(server._model)[-2]])

    server._set_head = noted
    server.run()
    _, _, before, after = trained
    np.testing.assert_array_equal(before[:, 2], after[:, 2])
    assert (before[:, :2] != after[:, :2]).any()


def test_models_are_compared_on_boards_that_tested_both(tmp_path):
    server = make_server(tmp_path, local([]), [])
    server._tests = {"a": Result(1.0, 0.9, 10), "b": Result(1.0, 0.5, 10)}
    assert server.is_worse({"a": Result(1.0, 0.8, 10), "c": Result(0.0, 1.0, 100)})
    assert not server.is_worse({"b": Result(1.0, 0.5, 10)}) and not server.is_worse({"c": Result(9.0, 0.0, 10)})


def test_what_takes_time_besides_steps_is_the_median_of_the_latest_round_and_late_boards_count(tmp_path):
    server = make_server(tmp_path, local([]), [], grace=20.0)
    assert server.pace.other_seconds() == 0
    server.records.rounds = [{"late": 0}, {"late": 0}]
    names = "round", "answer_seconds", "steps", "step_ms", "predicted_step_ms"
    of_boards = (0, 99.0, 1, 1.0, 1.0), (1, 9.0, 10, 500.0, 1.0), (1, 10.0, 10, 500.0, 1.0), (1, 11.0, 2, None, 2500.0)
    server.records.boards = [dict(zip(names, row, strict=True)) for row in of_boards]
    assert server.pace.other_seconds() == 5.0
    server.records.rounds[-1]["late"] = 4
    assert server.pace.other_seconds() == 20.0


def test_the_deadline_follows_the_speed_that_boards_measure_in_rounds(tmp_path, monkeypatch):
    monkeypatch.setattr("elastic_trainer.extensions.fleet.pace.LEAST_IMAGES", 16)
    board = make_board(0)

    def handle(parcel):
        if parcel.kind == "train":
            board.clock.ratios = [5.0] * 3  # the median is the same after this round's own
        return board.handle(parcel)

    server = make_server(tmp_path, LocalLink({1: handle}), [], data(7), boards=1, round_seconds=None)
    server.run()
    first, second = (row["round_seconds"] for row in server.records.rounds[1:])
    assert second == pytest.approx(5 * first, rel=0.01)


@pytest.mark.parametrize(("starts_boards", "expected"), [(False, 20.0), (True, 60.0)])
def test_where_each_message_starts_a_process_boards_have_the_time_that_getting_ready_took(
    tmp_path, starts_boards, expected
):
    """A board is ready 30 s after the server has greeted it."""
    link = LocalLink({1: make_board(0).handle}, lambda node, reply: 30.0)
    server = make_server(tmp_path, link, [], grace=20.0, starts_boards=starts_boards)
    server._roster.wait_for(1)
    assert server.pace.grace() == pytest.approx(expected, abs=1.0)


def test_no_board_is_asked_for_a_test_where_nobody_has_photos_for_it(tmp_path):
    asked, board = list[str](), Board(NAMES[0], lambda *_: make_setup(untested), RoundClock(), say=lambda line: None)
    untested = ImageData("small", CLASS_NAMES, photos(24), photos(0), BATCH)

    def handle(parcel):
        asked.append(parcel.kind)
        return board.handle(parcel)

    server = make_server(tmp_path, LocalLink({1: handle}), [], None, boards=1)
    server.run()
    assert "test" not in asked and [row["kept"] for row in rows(tmp_path / "metrics.csv")] == ["", "", ""]


def test_boards_test_the_models_of_a_server_without_photos_and_those_with_other_tensors_are_left_out(tmp_path):
    def other_network(parcel):
        arrays = {name: array[..., :1] for name, array in parcel.arrays.items()}
        return make_board(1).handle(Parcel(parcel.kind, parcel.values, arrays))

    said: list[str] = []
    link = LocalLink({1: make_board(0).handle, 2: other_network})
    make_server(tmp_path, link, said, None, boards=1, rounds=1).run()
    assert len([line for line in said if "other tensors" in line]) == 1
    found = rows(tmp_path / "metrics.csv")
    assert [row["boards"] for row in found] == ["1", "1"] and all(row["test_accuracy"] for row in found)


def test_a_round_lasts_as_long_as_the_fastest_board_needs_or_the_slowest_for_its_head():
    def board(images, image_ms):
        return About("", images, 0, images * image_ms / 1e3, images * image_ms / 4e3)

    boards = [board(1000, 10.0), board(200, 20.0), board(3000, 30.0)]
    mean = 1400
    assert usual_round_seconds(boards) == pytest.approx(1.3 * mean * 0.010)
    assert usual_round_seconds([*boards, board(1400, 1000.0)]) == pytest.approx(mean * 1.0 / 4 / 3)
    assert usual_round_seconds([board(1000, 10.0)], passes=2.0) == pytest.approx(20.0)
    assert usual_round_seconds([board(100, 10.0)]) == pytest.approx(800 * 0.010), "of few photos, more passes"


def test_the_rate_rises_and_falls():
    rates = [rate_of_round(number, 8, 1.0) for number in range(1, 9)]
    assert rates[0] < 0.4 and rates[1] < 0.7 and max(rates) == rates[2] and rates[-1] < 0.05
    assert rate_of_round(1, 1, 1.0) == pytest.approx(0.5)


def test_a_checkpoint_of_an_earlier_version_is_refused_in_one_line(tmp_path):
    Records(tmp_path, {}, NAMES).save({}, {"steps": 0, "seconds": 0.0})
    with pytest.raises(UserError, match="an earlier version made its rounds; start a new fleet without --resume"):
        Records(tmp_path, {}, NAMES).restore()
