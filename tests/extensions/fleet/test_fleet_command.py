"""The command line of fleet.py: what a server and a board are told, and mistakes in one line."""

from pathlib import Path

import hypothesis
import pytest
from fleets import free_port
from made_up_command_lines import command_lines
from made_up_runs import made_up_run

from elastic_trainer.cli.train_command import parse_main, parse_training
from elastic_trainer.datasets.batches import ShuffledData
from elastic_trainer.errors import UserError
from elastic_trainer.extensions.fleet.command_line import (
    JoinCommand,
    ServeCommand,
    board_command,
    parse_fleet,
    sent_words,
)
from elastic_trainer.extensions.fleet.connections import check_board, check_server
from elastic_trainer.extensions.fleet.settings import BoardSettings, FleetSettings
from elastic_trainer.files import write_json
from elastic_trainer.runs.reader import CONFIG
from fleet import _leave_out_test_folder


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


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(command_lines(("augment", "learning_rate", "weight_decay", "skip_broken", "test_fraction", "logdir")))
def test_a_fleet_trains_with_the_flags_that_were_typed(words):
    """As main.py with the same flags and the robust recipe; a board builds the network of its server."""
    command = serve(*words).training
    same = ["--recipe=robust", *words, "--train_type=elastic_training_upper_part", "--save_model"]
    wanted = parse_training(["--dataset_name=digits", *same])
    assert (command.network, command.data, command.training) == (wanted.network, wanted.data, wanted.training)
    own = [] if ".py:" not in command.network.model_name else ["--model_name", command.network.model_name]
    board = board_command(join(*own), sent_words(command, 7))
    for name in ("model_name", "input_size", "batch_size", "alpha", "optimizer", "seed", "clips_gradients"):
        assert getattr(board.network, name) == getattr(command.network, name), name
    for name in ("weight_decay", "gradient_clipping", "optimizer"):
        assert getattr(board.training, name) == getattr(command.training, name), name
    assert board.data.augment == command.data.augment and board.run.recipe == command.run.recipe


def test_what_was_typed_is_kept_where_it_equals_a_default(tmp_path):
    photos = ["--dataset_name", "image_folder", "--data_dir", "x"]
    paper = ["--model_name", "resnet50", "--input_size", "224", "--batch_size", "4", "--recipe", "paper"]
    command = serve(*photos, *paper).training
    network, training = command.network, command.training
    assert (network.model_name, network.input_size, network.batch_size) == ("resnet50", 224, 4)
    assert (command.run.recipe, training.learning_rate, training.gradient_clipping) == ("paper", 1e-4, None)
    with pytest.raises(UserError, match=r"--data_dir: works only with --dataset_name .*, not digits"):
        join("--dataset_name", "digits", "--data_dir", "x")
    with pytest.raises(UserError, match="--skip_broken: works only with --dataset_name image_folder"):
        join("--skip_broken")
    assert serve("--weight_decay", "0.0005", "--optimizer", "adam").training.warnings
    assert not serve("--optimizer", "adam").training.warnings, "the recipe was not typed"


def test_a_fleet_that_goes_on_has_the_flags_that_it_was_started_with(tmp_path):
    words = ["--batch_size", "4", "--recipe", "paper", "--rounds", "3", "--overwrite", "--run_name=-x"]
    started = serve(*words, "--logdir", str(tmp_path))
    folder = tmp_path / "-x"
    folder.mkdir()
    write_json(folder / CONFIG, started.config)
    again = serve("--resume", str(folder), "--rounds", "5")
    assert again.training.network.batch_size == 4 and again.training.run.recipe == "paper"
    assert again.training.network == started.training.network and again.training.training == started.training.training
    assert again.training.run.folder == folder and again.training.run.resume and not again.training.run.overwrite
    assert (started.fleet.rounds, again.fleet.rounds) == (3, 5) and again.config["command"] == started.config["command"]
    for changed in (["--batch_size", "8"], ["--recipe", "robust"], ["--changes", "float16"], ["--class_names", "a,b"]):
        with pytest.raises(UserError, match=r"the fleet in .* was started with --\w+ .*, not .*; use the same"):
            serve("--resume", str(folder), *changed)


def test_a_run_is_continued_by_the_program_that_started_it(tmp_path):
    served = made_up_run(tmp_path / "served", command=["serve", "--rounds", "3"])
    with pytest.raises(UserError, match=r"is the run of a fleet \(fleet.py serve\), not of main.py"):
        parse_main(["--resume", str(served)])
    for command, how in ((["--rho", "0.5"], "continue it with main.py"), (["simulate"], "a simulation starts again")):
        folder = made_up_run(tmp_path / command[0], command=command)
        with pytest.raises(UserError, match=f"is not the run of a fleet; {how}"):
            serve("--resume", str(folder))


def test_the_recipe_is_the_robust_one_unless_another_is_given():
    assert serve().training.training.learning_rate == 0.01 and serve().training.run.recipe == "robust"
    assert serve("--recipe", "paper").training.training.gradient_clipping in (None, 0)
    assert serve("--learning_rate", "0.5").training.training.learning_rate == 0.5


def test_a_server_without_photos_takes_the_names_of_its_classes():
    command = serve("--dataset_name", "image_folder", "--class_names", "cat,dog,fox")
    assert command.class_names == ["cat", "dog", "fox"]
    assert command.training.network.num_classes == 3
    assert serve().class_names is None
    apart, whole = "cafe\u0301", "caf\u00e9"  # the first is as a Mac writes it
    assert serve("--dataset_name", "image_folder", "--class_names", f"{apart},tea").class_names == [whole, "tea"]


def test_a_fleet_leaves_out_the_photos_of_the_test_folder(capsys):
    images = ShuffledData("photos", 8, 4, 2)
    _leave_out_test_folder(images)
    assert not capsys.readouterr().out
    images.held_out = ShuffledData("photos", 8, 6, 2)
    _leave_out_test_folder(images)
    assert images.held_out is None and "main.py --evaluate tests its model on them" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve", "--rounds", "0"], "--rounds: must be a whole number"),
        (["serve", "--class_names", "cat"], "--class_names cat: must be at least two"),
        (
            ["serve", "--class_names", "a,b", "--data_dir", "x", "--dataset_name", "image_folder"],
            "--class_names: the fold",
        ),
        (["serve", "--class_names", "a,b,c", "--num_classes", "5"], "--num_classes 5: --class_names has 3 names"),
        (["serve", "--run_name", ""], "--run_name: must be the name of a folder"),
        (["serve", "--rho", "0.5"], "--rho: is a flag of main.py, not of fleet.py"),
        (["simulate", "--boards", "5"], "--boards: is a flag of fleet.py serve, not of fleet.py simulate"),
        (["join", "--round_seconds", "5"], "--round_seconds: is a flag of fleet.py serve, not of fleet.py join"),
        (["simulate", "--client", "5"], "--client: there is no such flag; did you mean '--clients'?"),
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
        (BoardSettings("127.0.0.1:1", Path(__file__)), "is no certificate"),
        (BoardSettings("127.0.0.1:1", tmp_path / "no"), "there is no such file"),
    ):
        with pytest.raises(UserError, match=message):
            check_board(settings)
    port = free_port()
    for fleet, message in (
        (FleetSettings(host="0.0.0.0", port=port), "--certificates and --node_keys are needed"),
        (FleetSettings(node_keys=tmp_path, port=port), "--node_keys: needs --certificates"),
        (FleetSettings(certificates=tmp_path, port=port), "there is no server.pem"),
    ):
        with pytest.raises(UserError, match=message):
            check_server(fleet)
