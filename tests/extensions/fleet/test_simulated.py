"""Simulated boards: how photos are divided, and that their time is that of the table, not of this machine."""

from typing import Any

import numpy as np
import pytest
from command_line import ROOT
from conftest import BATCH
from fleets import data, make_server, make_setup

import fleet
from elastic_trainer.errors import Stopped, UserError
from elastic_trainer.extensions.fleet.command_line import ServeCommand, parse_fleet
from elastic_trainer.extensions.fleet.simulated import MESSAGE_SECONDS, SimulatedBoard, simulation, slowdowns, split


def test_speeds_lie_in_equal_ratios():
    np.testing.assert_allclose(slowdowns(3, 9.0), [1, 3, 9])
    assert slowdowns(1, 9.0).tolist() == [1]


@pytest.mark.parametrize("concentration", [None, 0.1])
def test_each_photo_is_on_one_board(concentration):
    labels = np.repeat(np.arange(5), 40)
    parts = split(labels, 4, concentration, 10, 0)
    assert sorted(np.concatenate(parts)) == [*range(200)] and min(map(len, parts)) >= 10
    counts = np.array([np.bincount(labels[part], minlength=5) for part in parts])
    assert (counts == 10).all() if concentration is None else (counts == 0).any()


def test_too_few_photos_for_the_boards_are_one_line_and_leave_no_run_folder(tmp_path):
    network = ["--model_name", f"{ROOT}/tests/zoo.py:branches", "--input_size", "16"]
    command = parse_fleet(["simulate", *network, "--clients", "5000", "--logdir", str(tmp_path / "logs")])
    assert isinstance(command, ServeCommand)
    with pytest.raises(UserError, match=r"--clients 5000: .* photos are too few for 5000 boards of at least 16"):
        fleet.serve(command)
    assert not (tmp_path / "logs").exists()


def test_a_stop_does_not_wait_for_all_boards_of_a_round(tmp_path):
    trained, photos = list[str](), data(count=48)

    def has_trained(line):
        trained.append(line)
        raise Stopped(2)

    parts = split(photos.training_labels, 3, None, 4, 0)
    link = simulation(make_setup(photos), parts, [1.0, 1.0, 1.0], has_trained)
    server = make_server(tmp_path, link, [], photos, boards=3, grace=100.0, round_seconds=2.0)
    with pytest.raises(Stopped):
        server.run()
    assert len(trained) == 1 and len(server.records.rounds) == 1, "round 0 is kept"


class BoardAlone(SimulatedBoard):
    """Compiles its own steps."""

    def __init__(self, name, make, clock, say, shared):
        super().__init__(name, make, clock, say, [])


def test_a_round_is_at_least_as_long_as_its_messages_took(tmp_path, monkeypatch):
    monkeypatch.setattr("elastic_trainer.extensions.fleet.pace.LEAST_IMAGES", 16)
    photos = data(count=48)
    link = simulation(make_setup(photos), split(photos.training_labels, 3, None, 4, 0), [1.0] * 3, print)
    settings = {"grace": 100.0, "round_seconds": None}
    server = make_server(tmp_path, link, [], photos, boards=3, **settings)
    server.run()
    first, second = (row["round_seconds"] for row in server.records.rounds[1:])
    assert first < 1.0 and second == pytest.approx(MESSAGE_SECONDS, abs=0.3)


def test_boards_share_steps_train_as_if_each_had_its_own_and_take_the_times_of_the_table(tmp_path):
    found, photos = list[Any](), data(count=48)
    for kind in (SimulatedBoard, BoardAlone):
        setup = make_setup(photos)
        parts = split(photos.training_labels, 3, None, 4, 0)
        seconds = 1.5 * len(parts[0]) // photos.batch_size * setup.table.full_step_ms / 1e3
        link = simulation(setup, parts, [1.0, 40.0, 1.0], lambda line: None, kind, message_seconds=4.0)
        settings = {"grace": 100.0, "round_seconds": seconds}
        server = make_server(tmp_path / kind.__name__, link, [], photos, 0.05, boards=3, **settings)
        server.run()
        boards: list[Any] = [handle.__self__ for handle in link.boards.values()]  # type: ignore[attr-defined]
        found.append((server, {board.trainer.training for board in boards}))
    (shared, [training]), (alone, others) = found
    everything = np.ones(len(setup.model.trainable_variables), bool)
    assert len(others) == 3
    assert training.make_step(BATCH, everything) is training.make_step(BATCH, everything)
    for name, weight in alone.weights.items():
        np.testing.assert_allclose(shared.weights[name], weight, rtol=1e-5, atol=1e-6)
    # A round takes its deadline and a message, the last one two more for its head; they are looked for every 0.25 s.
    ends = [row["train_seconds"] for row in shared.records.rounds]
    assert np.diff(ends) == pytest.approx([seconds + 4.0, seconds + 12.0], abs=0.6)
    # All of the round is for steps: what this machine takes to load weights does not count.
    fast = [row for row in shared.records.boards if row["board"] != "board-2"]
    slow = [row for row in shared.records.boards if row["board"] == "board-2"]
    assert all(row["steps"] == int(1e3 * seconds / row["predicted_step_ms"]) for row in fast)
    assert all(row["steps"] == 1 and row["trained_tensors"] < fast[0]["trained_tensors"] for row in slow)
