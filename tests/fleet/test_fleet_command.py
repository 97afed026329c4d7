"""The command line of fleet.py: what a server and a board are told, and mistakes in one line."""

from pathlib import Path

import pytest

from elastic_trainer.errors import UserError
from elastic_trainer.fleet.command_line import JoinCommand, ServeCommand, board_command, parse_fleet, sent_words
from elastic_trainer.fleet.processes import check_board, check_server, free_port
from elastic_trainer.fleet.settings import BoardSettings, FleetSettings


def serve(*words):
    command = parse_fleet(["serve", *words])
    assert isinstance(command, ServeCommand)
    return command


def join(*words):
    command = parse_fleet(["join", *words])
    assert isinstance(command, JoinCommand)
    return command


def test_a_board_builds_the_network_of_its_server(tmp_path):
    command = serve("--batch_size", "8", "--weight_decay", "0.001", "--seed", "5", "--logdir", str(tmp_path))
    words = sent_words(command.training, 7)
    board = board_command(join("--memory", "900M", "--logdir", str(tmp_path)), words)
    own, theirs = board.network, command.training.network
    for name in ("model_name", "input_size", "batch_size", "alpha", "optimizer", "seed", "clips_gradients"):
        assert getattr(own, name) == getattr(theirs, name), name
    assert own.num_classes == 7 and own.weights == "none" and board.training.memory == 900
    assert board.training.weight_decay == 0.001 and board.training.gradient_clipping == 0.02
    assert board.data.augment == command.training.data.augment


def test_the_recipe_is_the_robust_one_unless_another_is_given():
    assert serve().training.training.learning_rate == 0.01 and serve().training.run.recipe == "robust"
    assert serve("--recipe", "paper").training.training.gradient_clipping in (None, 0)
    assert serve("--learning_rate", "0.5").training.training.learning_rate == 0.5


def test_a_server_without_photos_takes_the_names_of_its_classes():
    command = serve("--dataset_name", "image_folder", "--class_names", "cat,dog,fox")
    assert command.class_names == ["cat", "dog", "fox"] and not command.has_photos
    assert command.training.network.num_classes == 3
    assert serve().has_photos


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve", "--rounds", "0"], "--rounds: must be a whole number"),
        (["serve", "--class_names", "cat"], "--class_names cat: must be at least two"),
        (
            ["serve", "--class_names", "a,b", "--data_dir", "x", "--dataset_name", "image_folder"],
            "--class_names: the fold",
        ),
        (["serve", "--rho", "0.5"], "--rho: is a flag of main.py, not of fleet.py"),
        (["serve", "--resume", "nowhere"], "--resume nowhere: contains no run"),
        (["join", "--model_name", "resnet50"], "--model_name resnet50: the server says which network"),
        (["join", "--slowdown", "0"], "--slowdown: must be from 1"),
        ([], "serve|join"),
    ],
)
def test_mistakes_are_one_line_that_names_the_flag(words, message):
    with pytest.raises(UserError) as raised:
        parse_fleet(words)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_a_server_may_not_choose_files_of_a_board():
    words = sent_words(serve().training, 10)
    for more in (["--logdir", "/etc"], ["--weights", "/etc/passwd"], ["--data_dir", "/"], ["--seed"]):
        with pytest.raises(UserError, match="options that this board does not know"):
            board_command(join(), [*words, *more])
    own = [*words]
    own[own.index("--model_name") + 1] = "/somewhere/network.py:make"
    with pytest.raises(UserError, match="its own copy"):
        board_command(join(), own)


def test_other_machines_are_reached_with_tls_only(tmp_path):
    check_board(BoardSettings("127.0.0.1:1"))
    for settings, message in (
        (BoardSettings("192.168.1.10:9092"), "--root_certificates is needed"),
        (BoardSettings("here"), "must be HOST:PORT"),
        (BoardSettings("127.0.0.1:1", None, Path(__file__)), "--private_key: needs --root_certificates"),
        (BoardSettings("127.0.0.1:1", tmp_path / "no"), "there is no such file"),
    ):
        with pytest.raises(UserError, match=message):
            check_board(settings)
    port = free_port()
    for fleet, message in (
        (FleetSettings(host="0.0.0.0", port=port), "--certificates is needed"),
        (FleetSettings(node_keys=tmp_path, port=port), "--node_keys: needs --certificates"),
        (FleetSettings(certificates=tmp_path, port=port), "there is no ca.crt"),
    ):
        with pytest.raises(UserError, match=message):
            check_server(fleet)
