"""Simulated boards: how photos are divided, and that their time is that of the table, not of this machine."""

import numpy as np
import pytest
from command_line import ROOT
from conftest import make_small_model, make_table
from fleets import data, make_server

import fleet
from elastic_trainer.errors import Stopped, UserError
from elastic_trainer.extensions.fleet.client import Made
from elastic_trainer.extensions.fleet.command_line import ServeCommand, parse_fleet
from elastic_trainer.extensions.fleet.simulated import SimulatedBoard, simulation, slowdowns, split
from elastic_trainer.settings import Settings


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
    with pytest.raises(ValueError, match="too few"):
        split(labels, 30, None, 10, 0)


def test_a_simulated_round_takes_its_deadline_and_the_messages(tmp_path):
    model, photos = make_small_model(), data(count=48)
    made = Made(model, photos, make_table(model), Settings(weight_decay=0.0, gradient_clipping=0.02))
    parts = split(photos.training_labels, 2, None, 4, 0)
    link, clock = simulation(made, parts, [1.0, 5.0], lambda line: None, message_seconds=4.0)
    said: list[str] = []
    server = make_server(tmp_path, link, said, photos, grace=100.0, round_seconds=2.0, clock=clock)
    server.run()
    seconds = [row["train_seconds"] for row in server._records.rounds]
    assert np.diff(seconds) == pytest.approx([6.0, 6.0], abs=0.6)
    fast, slow = ([row for row in server._records.boards if row["board"] == f"board-{k}"] for k in (1, 2))
    assert all(one["steps"] > other["steps"] for one, other in zip(fast, slow, strict=True))
    # All of the round is for steps: what this machine takes to load weights does not count.
    assert all(row["steps"] == int(2000 / row["predicted_step_ms"]) for row in server._records.boards)


def test_a_stop_does_not_wait_for_all_boards_of_a_round(tmp_path):
    model, photos = make_small_model(), data(count=48)
    made = Made(model, photos, make_table(model), Settings(weight_decay=0.0, gradient_clipping=0.02))
    trained: list[str] = []

    def has_trained(line):
        trained.append(line)
        raise Stopped(2)

    parts = split(photos.training_labels, 3, None, 4, 0)
    link, clock = simulation(made, parts, [1.0, 1.0, 1.0], has_trained, message_seconds=0.0)
    server = make_server(tmp_path, link, [], photos, boards=3, grace=100.0, round_seconds=2.0, clock=clock)
    with pytest.raises(Stopped):
        server.run()
    assert len(trained) == 1 and len(server._records.rounds) == 1, "round 0 is kept"


class BoardAlone(SimulatedBoard):
    """Compiles its own steps."""

    def _start(self, made):
        self.shared = []
        super()._start(made)


def test_boards_share_steps_and_train_as_if_each_had_its_own(tmp_path):
    found = []
    for kind in (SimulatedBoard, BoardAlone):
        model, photos = make_small_model(), data(count=48)
        made = Made(model, photos, make_table(model), Settings(weight_decay=0.0, gradient_clipping=0.02))
        parts, boards = split(photos.training_labels, 3, None, 4, 0), list[SimulatedBoard]()

        def remembered(*args, kind=kind, boards=boards):
            boards.append(kind(*args))
            return boards[-1]

        link, clock = simulation(made, parts, [1.0, 40.0, 1.0], lambda line: None, remembered, message_seconds=0.0)
        full_seconds = len(parts[0]) // photos.batch_size * made.table.full_step_ms / 1e3
        seconds = {"grace": 100.0, "round_seconds": 1.5 * full_seconds}
        server = make_server(tmp_path / kind.__name__, link, [], photos, 0.05, boards=3, clock=clock, **seconds)
        server.run()
        found.append((server.weights, boards))
    (shared, boards), (alone, _) = found
    [training] = boards[0].shared
    assert all(board._trainer.training is training for board in boards)
    assert len(training._steps) == 2, "everything, and what fits on the slow board"
    for name, weight in alone.items():
        np.testing.assert_allclose(shared[name], weight, rtol=1e-5, atol=1e-6)


def test_too_few_photos_for_the_boards_are_one_line_and_leave_no_run_folder(tmp_path):
    network = ["--model_name", f"{ROOT}/tests/zoo.py:branches", "--input_size", "16"]
    command = parse_fleet(["simulate", *network, "--clients", "5000", "--logdir", str(tmp_path / "logs")])
    assert isinstance(command, ServeCommand)
    with pytest.raises(UserError, match=r"--clients 5000: .* photos are too few for 5000 boards of at least 16"):
        fleet.serve(command)
    assert not (tmp_path / "logs").exists()
