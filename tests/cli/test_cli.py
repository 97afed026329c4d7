"""The command lines: each mistake is one clear line, and profiler.py then main.py leave what they promise."""

import json
import re

import pytest
from command_line import NETWORK, command, error_line

from elastic_trainer.cli.commands import parse_profiler, profiler_command
from elastic_trainer.cli.train_command import parse_main, parse_training
from elastic_trainer.networks.names import GLYPH_WEIGHTS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model_name", "resnet5"], "--model_name: 'resnet5' is not one of resnet50, .*; did you mean 'resnet50'?"),
        (["--dataset_name", "cifar"], "--dataset_name: 'cifar' is not one of"),
        (["--train_type", "elastic"], "--train_type: 'elastic' is not one of .*; did you mean 'elastic_training'?"),
        (["--rho", "1.5"], "--rho: must be above 0 and at most 1, not '1.5'"),
        (["--rho", "0"], "--rho: must be above 0"),
        (["--rho", "nan"], "--rho: must be above 0"),
        (["--rho", "half"], "--rho: must be above 0 and at most 1, not 'half'"),
        (["--batch_size", "0"], "--batch_size: must be a whole number from 1 to 65,536, not '0'"),
        (["--batch_size", "-4"], "--batch_size: must be a whole number from 1 to 65,536, not '-4'"),
        (["--batch_size", "4.0"], "--batch_size: must be a whole number from 1 to 65,536, not '4.0'"),
        (["--batch_size", "9" * 30], "--batch_size: must be a whole number from 1 to 65,536, not '999"),
        (["--batch_size"], "--batch_size: expected one argument"),
        (["--input_size", "22400"], "--input_size: must be a whole number from 1 to 4,096, not '22400'"),
        (["--num_classes", "1"], "--num_classes: must be a whole number from 2 to 100,000, not '1'"),
        (["--seed", "-1"], "--seed: must be a whole number from 0 to 2,147,483,647, not '-1'"),
        (["--seed", "2147483648"], "--seed: must be a whole number from 0 to 2,147,483,647"),
        (["--alpha", "0"], "--alpha: must be from 0.01 to 4, not '0'"),
        (["--alpha", "35"], "--alpha: must be from 0.01 to 4, not '35'"),
        (["--num_epochs", "0"], "--num_epochs: must be a whole number from 1 to 1,000,000, not '0'"),
        (["--interval", "0"], "--interval: must be a number above 0, not '0'"),
        (["--max_steps", "0"], "--max_steps: must be a whole number from 1 to"),
        (["--time_resolution", "9"], "--time_resolution: must be a whole number from 10 to 10,000,000, not '9'"),
        (["--learning_rate", "nan"], "--learning_rate: must be above 0 and at most 100, not 'nan'"),
        (["--learning_rate", "1e4"], "--learning_rate: must be above 0 and at most 100, not '1e4'"),
        (["--learning_rate", "-1e-3"], "--learning_rate: "),  # newer Pythons see a number here, older ones a flag
        (["--weight_decay", "-0.1"], "--weight_decay: must be from 0 to 100, not '-0.1'"),
        (["--weight_decay", "inf"], "--weight_decay: must be from 0 to 100, not 'inf'"),
        (["--deadline", "0"], "--deadline: must be a time above 0"),
        (["--deadline", "nan"], "--deadline: must be a time above 0"),
        (["--deadline", "2d"], "--deadline: must be a time above 0 such as 3600, 90m or 2.5h, not '2d'"),
        (["--optimizer", "SGDW"], "--optimizer: 'SGDW' is not one of sgd, adam; did you mean 'sgd'?"),
        (["--model_name", "MobileNet-V2"], "--model_name: .*; did you mean 'mobilenetv2'?"),
        (["--dataset_name", "oxford_pets"], "--dataset_name: .*; did you mean 'oxford_iiit_pet'?"),
        (["--dataset_name", "CUB_birds2011"], "--dataset_name: .*; did you mean 'caltech_birds2011'?"),
        (["--dataset_name", "folder"], "--dataset_name: .*; did you mean 'image_folder'?"),
        (["--augment", "flips"], "--augment: .*; did you mean 'flip'?"),
        (
            ["--weights", "imagnet"],
            "--weights: 'imagnet' is neither .* or folder of a run; did you mean 'imagenet'?",
        ),
        (["--weights", "None"], "--weights: .*; did you mean 'none'?"),
        (
            ["--weights", "no/such.h5"],
            "--weights: 'no/such.h5' is neither imagenet nor none, and there is no such file or folder of a run$",
        ),
        (["--weights", ""], "--weights: "),
        (["--data_dir", "photos"], "--data_dir: digits needs none; give --dataset_name image_folder"),
        (["--skip_broken"], "--skip_broken: goes with --dataset_name image_folder only"),
        (["--save_txt", "maybe"], "--save_txt: must be True or False, not 'maybe'"),
        (["--run_name", "a/b"], "--run_name must be the plain name of a folder, not 'a/b'"),
        (["--run_name", ""], "--run_name must be the plain name of a folder, not ''"),
        (["--run_name", ".."], "--run_name must be the plain name of a folder, not '..'"),
        (["--run_name", "a\nb"], "--run_name must be the plain name of a folder"),
        (["--run_name", "profiles"], "--run_name must not be 'profiles'"),
        (["--model_name", "vgg16", "--alpha", "0.5"], "--alpha: vgg16 has one width only"),
        (["--rhoo", "1"], "--rhoo: there is no such flag; did you mean '--rho'?"),
        (["--batch-size=4"], "--batch-size: there is no such flag; did you mean '--batch_size'?"),
        (["--num", "4"], "--num: there is no such flag"),  # not short for one of two
        (["--learning", "1e-3"], "--learning: there is no such flag; did you mean '--learning_rate'?"),
        (["-rho", "0.5"], "-rho: there is no such flag; did you mean '--rho'?"),
        (["--qqq"], "--qqq: there is no such flag; --help lists them"),
        (["resnet50"], "'resnet50' belongs to no flag; each value stands behind its flag"),
        (["--timing", "flops"], "--timing: is a flag of profiler.py, not of main.py"),
    ],
)
def test_bad_options_are_named(arguments, message):
    from utils import UserError

    with pytest.raises(UserError) as caught:
        parse_main(arguments)
    assert re.match(message.replace("?", r"\?"), str(caught.value)), str(caught.value)


def test_a_flag_of_the_other_command_is_told_apart_from_a_mistyped_one():
    from utils import UserError

    with pytest.raises(UserError, match=r"--num_epochs: is a flag of main\.py, not of profiler\.py"):
        parse_profiler(["--num_epochs", "3"])
    with pytest.raises(UserError, match="--num_class: there is no such flag; did you mean '--num_classes'"):
        parse_profiler(["--num_class", "3"])


def test_a_bad_option_is_one_line_on_stderr():
    assert "--rho: must be above 0 and at most 1, not '7'" in error_line("main.py", "--rho", "7")


def test_defaults_follow_the_data_set_and_the_model():
    digits = parse_training([]).network
    assert (digits.model_name, digits.alpha, digits.input_size) == ("mobilenetv2", 0.35, 64)
    assert digits.weights == str(GLYPH_WEIGHTS)
    paper = parse_training(["--dataset_name", "caltech_birds2011"])
    network, training = paper.network, paper.training
    assert (network.model_name, network.input_size, network.batch_size) == ("resnet50", 224, 4)
    assert (network.weights, training.learning_rate) == ("imagenet", 1e-4)
    assert (training.num_epochs, training.interval) == (12, 3)
    vit = parse_training(["--model_name", "vit"])
    assert (network.optimizer, vit.network.optimizer) == ("sgd", "adam") == (training.optimizer, vit.training.optimizer)
    for other in (["--model_name", "resnet50"], ["--alpha", "1.0"]):
        assert parse_training(other).network.weights == "imagenet"
    given = parse_training(["--weights", "none", "--learning_rate", "0.5", "--save_model", "False"])
    assert (given.network.weights, given.training.learning_rate, given.training.save_model) == ("none", 0.5, False)


def test_the_suggested_profiler_command_makes_the_same_table():
    command = parse_training(["--model_name", "vit", "--input_size", "32", "--batch_size", "2"]).with_classes(10)
    suggested = parse_profiler(profiler_command(command.network, command.data, command.run.logdir).split()[2:])
    assert suggested.network == command.network and suggested.logdir == command.run.logdir
    assert suggested.data.dataset_name == command.data.dataset_name


def test_profile_then_train_then_compare(tmp_path):
    """The whole chain as a user runs it, on the real digits, and the mistakes on the way."""
    flags = [*NETWORK, "--logdir", tmp_path]
    missing = error_line("main.py", *flags)
    assert (
        "no timing table in" in missing
        and "python profiler.py --model_name " in missing
        and "zoo.py:branches" in missing
    )
    assert not list(tmp_path.iterdir()), "a refused run leaves nothing"

    profiled = command("profiler.py", *flags)
    assert profiled.returncode == 0, profiled.stderr
    assert "operation time that matched no operation of the network: 0." in profiled.stdout
    assert "smallest feasible rho" in profiled.stdout
    [folder] = (tmp_path / "profiles").glob("*_16_10_64")
    assert {"table.csv", "profile.json", "timing.png", "timing.pdf"} <= {path.name for path in folder.iterdir()}
    profile = json.loads((folder / "profile.json").read_text())
    assert profile["full_step_ms"] == pytest.approx(profile["forward_ms"] + profile["backward_ms"])

    profile["environment"]["packages"]["tensorflow"] = "2.0.0"
    whole = (folder / "profile.json").read_text()
    (folder / "profile.json").write_text(json.dumps(profile))
    stale = error_line("main.py", *flags)
    assert "made elsewhere: TensorFlow 2.0.0, here 2." in stale and "or use it all the same with --allow_stale" in stale
    assert len(list(tmp_path.iterdir())) == 1, "a refused run leaves nothing"
    used = command("main.py", *flags, "--max_steps", "1", "--run_name", "stale", "--allow_stale_profile")
    assert used.returncode == 0, used.stderr
    assert "warning: " in used.stdout and "used all the same (--allow_stale_profile)" in used.stdout
    (folder / "profile.json").write_text(whole)

    infeasible = error_line("main.py", *flags, "--rho", "0.01")
    assert "--rho 0.01: training the head alone takes" in infeasible and "give at least 0." in infeasible

    run = [*flags, "--max_steps", "6", "--run_name", "mine", "--rho", "0.9", "--save_txt"]
    for _ in range(2):
        done = command("main.py", *run)
        assert done.returncode == 0, done.stderr
        assert "accuracy" in done.stdout.splitlines()[-1]
    assert (tmp_path / "mine" / "summary.json").is_file() and (tmp_path / "mine-2" / "summary.json").is_file()
    assert len((tmp_path / "mine" / "mine.txt").read_text().split()) == 2

    full = command(
        "main.py", *flags, "--train_type", "full_training", "--max_steps", "6", "--overwrite", "--run_name", "mine"
    )
    assert full.returncode == 0, full.stderr
    summary = json.loads((tmp_path / "mine" / "summary.json").read_text())
    assert summary["train_type"] == "full_training" and summary["rho"] is None
    assert len(list((tmp_path / "mine").glob("events.out.*"))) == 1, "the old run is not mixed into the new one"
    assert not (tmp_path / "mine" / "mine.txt").exists()

    compared = command(
        "scripts/figures/plot_accuracy_time.py", tmp_path / "mine", tmp_path / "mine-2", "--output", tmp_path / "figure"
    )
    assert compared.returncode == 0, compared.stderr
    lines = compared.stdout.splitlines()
    assert lines[0].split("  ")[0] == "scheme"
    assert [line.split("  ")[0] for line in lines[2:4]] == ["ElasticTrainer", "Full training"]
    assert (tmp_path / "figure.pdf").is_file() and (tmp_path / "figure.png").is_file()


def test_overwrite_spares_a_folder_that_holds_no_run(tmp_path):
    import utils
    from elastic_trainer.runs.folder import run_folder

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    with (
        pytest.raises(utils.UserError, match=r"--overwrite: .* is not the folder of a run"),
        run_folder(tmp_path, "mine", overwrite=True),
    ):
        pass
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "years of work"
    with run_folder(tmp_path, "mine") as folder:
        assert folder.name == "mine-2"


def test_a_file_that_cannot_be_written_is_named_and_the_old_one_stays(tmp_path):
    import utils

    path = tmp_path / "summary.json"
    utils.write_json(path, {"old": 1})

    def full_disk():
        with utils.atomic_path(path) as temporary:
            temporary.write_text("half")
            raise OSError(28, "No space left on device")

    with pytest.raises(utils.UserError, match=r"summary\.json: cannot be written: No space left on device"):
        full_disk()
    assert json.loads(path.read_text()) == {"old": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]


@pytest.mark.parametrize("kind", ["numpy", "tensorflow", "python"])
def test_memory_that_runs_out_is_one_line(kind, capsys):
    import numpy as np
    import tensorflow as tf

    import utils

    def main():
        if kind == "numpy":
            np.zeros(2**55, np.uint8)
        if kind == "python":
            raise MemoryError
        message = "Graph execution error:\n\nOOM when allocating tensor with shape[65536,64,112,112] and type float\n"
        raise tf.errors.ResourceExhaustedError(None, None, message)

    with pytest.raises(SystemExit) as stopped:
        utils.run_cli(main)
    assert stopped.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    reason = {"numpy": r" \(Unable to allocate 32.0 PiB .*\)", "python": ""}.get(kind, r" \(.*65536,64,112,112\]\)")
    assert len(lines) == 1 and re.search(f": error: memory ran out{reason}; a smaller --batch_size", lines[0]), lines


def test_other_errors_keep_their_traceback():
    import utils

    def main():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        utils.run_cli(main)
