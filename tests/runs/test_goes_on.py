"""A finished run goes on with more epochs, or until a later deadline, under a new schedule."""

import json
import shutil

import keras
import numpy as np
import pytest
from command_line import NETWORK, run_here, train_here
from small_runs import rows_of

import main
from elastic_trainer.cli.commands import parse_training
from elastic_trainer.runs import trainer
from elastic_trainer.runs.reader import read_settings, read_summary
from elastic_trainer.system.errors import Stopped, UserError

STEPS, RATE = 14, 0.01  # of an epoch


def weights_of(model):
    return {variable.numpy().tobytes() for variable in model.variables}


def last_weights(folder):
    return weights_of(keras.models.load_model(folder / "last.keras"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of one epoch, which selects twice."""
    logdir = tmp_path_factory.mktemp("logs")
    words = ["--rho", 0.7, "--interval", 0.5, "--learning_rate", RATE, "--deterministic", "--save_model"]
    words = [*NETWORK, *words, "--num_epochs", 1, "--logdir", logdir, "--run_name", "mine"]
    run_here(main.main, "main.py", *words)
    return logdir / "mine"


@pytest.fixture
def mine(finished, tmp_path):
    """A copy of it."""
    return shutil.copytree(finished, tmp_path / "mine")


def test_a_run_that_goes_on_trains_the_added_epochs_as_if_it_was_not_interrupted(mine, tmp_path, capsys, monkeypatch):
    before, end = rows_of(mine / "metrics.csv"), last_weights(mine)
    other = shutil.copytree(mine, tmp_path / "other")
    run_here(main.main, "main.py", "--resume", mine, "--num_epochs", 3)
    assert f"{mine} goes on from epoch 1 with a new schedule of 2 epochs" in capsys.readouterr().out
    rows = rows_of(mine / "metrics.csv")
    assert rows[: len(before)] == before and [row["epoch"] for row in rows] == ["0", "1", "2", "3"]
    assert [int(row["step"]) for row in rows] == [0, STEPS, 2 * STEPS, 3 * STEPS]
    rates = [float(row["learning_rate"]) for row in rows[2:]]
    assert rates == pytest.approx([RATE / 2 * (1 + np.cos(np.pi * step / (2 * STEPS))) for step in (13, 27)], rel=1e-4)
    summary = read_summary(mine)
    assert (summary["epochs"], summary["steps"]) == (3, 3 * STEPS)
    assert summary["best_accuracy"] == max(float(row["test_accuracy"]) for row in rows)
    assert [path.name for path in (mine / "checkpoints").iterdir()] == [f"step-{3 * STEPS:010}.npz"]

    step, seen = trainer.Trainer.step, []

    def stopped(self, batch):
        seen.append(weights_of(self.training.model))
        if len(seen) == 6:
            raise Stopped(15)
        return step(self, batch)

    monkeypatch.setattr(trainer.Trainer, "step", stopped)
    with pytest.raises(Stopped, match=f"stopped after step {STEPS + 5} of {3 * STEPS}; continue with"):
        run_here(main.main, "main.py", "--resume", other, "--num_epochs", 3)
    assert seen[0] == end
    run_here(main.main, "main.py", "--resume", other)
    assert last_weights(other) == last_weights(mine) != end
    capsys.readouterr()
    run_here(main.main, "main.py", "--resume", other, "--num_epochs", 3)
    assert f"{other} is finished: accuracy" in capsys.readouterr().out


def test_a_run_goes_on_until_a_later_deadline(finished, tmp_path, capsys):
    """Without `--deterministic`; it had ended within an epoch."""
    words = [*NETWORK, "--train_type", "full_training", "--max_steps", 3, "--logdir", tmp_path, "--run_name", "short"]
    train_here(*words)
    folder = tmp_path / "short"
    seconds = read_summary(folder)["elapsed_seconds"] + 12
    train_here("--resume", folder, "--deadline", f"{seconds:.1f}")
    assert "short goes on from epoch 1 with a new schedule until " in capsys.readouterr().out
    rows, summary = rows_of(folder / "metrics.csv"), read_summary(folder)
    rates = [float(row["learning_rate"]) for row in rows if row["learning_rate"]]
    assert summary["steps"] > 3 + STEPS and summary["wall_seconds"] < seconds
    assert int(rows[-2]["step"]) % STEPS == 3 and rates[-1] < 0.05 * max(rates[1:])
    with pytest.raises(UserError, match=r"--deterministic: cannot be combined with --deadline"):
        parse_training(["--resume", str(finished), "--deadline", "1e6"])


def test_what_is_no_more_than_a_run_has_done_is_refused_and_changes_nothing(mine):
    config = json.loads((mine / "config.json").read_text())
    (mine / "config.json").write_text(json.dumps({**config, "num_epochs": 4}))  # which a deadline ended
    for words, message in (
        (["--num_epochs", "1"], "--num_epochs 1: the run in .* has 1 already; give more"),
        (["--deadline", "0.01"], r"--deadline 0\.01: the run in .* has taken .* already; give more"),
    ):
        with pytest.raises(UserError, match=message):
            parse_training(["--resume", str(mine), *words])
    for path in (mine / "checkpoints").iterdir():
        path.unlink()
    with pytest.raises(UserError, match=r"has no checkpoint of its end; start again without --resume"):
        train_here("--resume", mine, "--num_epochs", 2)
    assert read_settings(mine).num_epochs == 4 and read_summary(mine)["epochs"] == 1
