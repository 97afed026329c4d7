"""A run that was cut off goes on from its last checkpoint and ends as if nothing had happened."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import make_small_data, make_small_model, make_table
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import models
import train
import utils
from checkpoint import Checkpoints
from run_log import RunLog
from train import Settings
from utils import Stopped, UserError

ROOT = Path(__file__).resolve().parent.parent
EPOCHS, STEPS = 4, 6  # of the runs below


class Cut(BaseException):
    """Stands for a power cut: nothing catches it."""


class CuttingData:
    """The small data; cuts the run off when step `at` is about to begin, or in the test after it."""

    def __init__(self, at, in_test=False):
        self._data, self._at, self._in_test = make_small_data(), at, in_test

    def __getattr__(self, name):
        return getattr(self._data, name)

    def train(self, epoch, skip=0):
        self._step = epoch * self._data.steps_per_epoch + skip
        self._skip, self._epoch = skip, epoch
        return self

    def take(self, count):
        for batch in self._data.train(self._epoch, self._skip).take(count):
            if self._step == self._at and not self._in_test:
                raise Cut
            self._step += 1
            yield batch

    def test(self):
        if self._in_test and self._step >= self._at:
            raise Cut
        return self._data.test()


def run(folder, data, **changes):
    """One elastic run, or what is left of it; its weights and optimizer-driven records."""
    settings = Settings(
        **{
            "learning_rate": 0.05,
            "num_epochs": EPOCHS,
            "interval": 0.5,
            "rho": 0.6,
            "correct_budget": False,
            "checkpoint_steps": 1,
            **changes,
        }
    )
    folder.mkdir(exist_ok=True)
    model = make_small_model()
    with RunLog(folder, {"seed": 0}, models.tensor_names(model)) as log:
        budget = train.make_budget(model, data, settings, make_table(model))
        summary = log.finish(train.elastic_training(model, data, settings, log, budget))
    return [variable.numpy() for variable in model.variables], summary


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def events_of(folder):
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    events.Reload()
    return {
        tag: [event.step for event in events.Tensors(tag)]
        for tag in events.Tags()["tensors"]
        if not tag.startswith("over_training_seconds")
    }


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    return folder, *run(folder, make_small_data())


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize(
    ("cuts", "every"),
    [
        ([(1, False)], 1),  # after the first step
        ([(STEPS, False)], 1),  # between two epochs
        ([(9, False)], 1),  # before a selection in the middle of an epoch
        ([(10, False), (10, False), (17, False)], 4),  # some way after a checkpoint, and again before the next
        ([(2 * STEPS, True), (3 * STEPS, True)], 1),  # in a test
        ([(2, False)], 100),  # before the first checkpoint
    ],
)
def test_a_resumed_run_ends_as_an_unbroken_one(cuts, every, optimizer, tmp_path, unbroken):
    folder, weights, summary = unbroken
    if optimizer == "adam":
        folder = tmp_path / "unbroken"
        weights, summary = run(folder, make_small_data(), optimizer="adam")
    for at, in_test in cuts:
        with pytest.raises(Cut):
            run(tmp_path / "cut", CuttingData(at, in_test), optimizer=optimizer, checkpoint_steps=every)
    resumed, resumed_summary = run(tmp_path / "cut", make_small_data(), optimizer=optimizer, checkpoint_steps=every)
    for one, other in zip(weights, resumed, strict=True):
        np.testing.assert_array_equal(one, other)
    assert (resumed_summary["steps"], resumed_summary["epochs"]) == (EPOCHS * STEPS, EPOCHS)
    assert resumed_summary["best_accuracy"] == summary["best_accuracy"]
    for name, columns in (
        ("metrics", ["epoch", "step", "learning_rate", "train_loss", "train_accuracy", "test_loss", "trained_tensors"]),
        ("selections", ["epoch", "step", "name", "importance", "chosen", "budget_step_ms"]),
    ):
        pairs = zip(rows(folder / f"{name}.csv"), rows(tmp_path / "cut" / f"{name}.csv"), strict=True)
        for expected, found in pairs:
            assert [expected[column] for column in columns] == [found[column] for column in columns]
    seconds = [float(row["train_seconds"]) for row in rows(tmp_path / "cut" / "metrics.csv")]
    assert sorted(seconds) == seconds and seconds[-1] == pytest.approx(resumed_summary["train_seconds"])


def test_events_of_a_resumed_run_have_no_gap_and_no_overlap(tmp_path, unbroken):
    for at, in_test in [(2, False), (10, False), (3 * STEPS, True)]:
        with pytest.raises(Cut):
            run(tmp_path / "cut", CuttingData(at, in_test), checkpoint_steps=4)
    run(tmp_path / "cut", make_small_data(), checkpoint_steps=4)
    expected, found = events_of(unbroken[0]), events_of(tmp_path / "cut")
    assert set(expected) <= set(found)
    for tag in ("test/accuracy", "test/loss", "selection/trained_tensors", "budget/rho"):
        assert found[tag] == expected[tag], tag
    assert expected["budget/rho"] == [0, 3, 6, 9, 12, 15, 18, 21]
    for tag in ("train/loss", "learning_rate"):
        assert sorted(set(found[tag])) == found[tag] and found[tag][-1] == EPOCHS * STEPS
        assert set(expected[tag]) <= set(found[tag])  # and a point more at each checkpoint


def test_the_clocks_go_on(tmp_path):
    with pytest.raises(Cut):
        run(tmp_path / "cut", CuttingData(20))
    [path, _] = sorted((tmp_path / "cut" / "checkpoints").iterdir(), reverse=True)
    begun = Checkpoints(path.parent).latest().state["history"]["clocks"]
    time.sleep(0.5)
    _, summary = run(tmp_path / "cut", make_small_data())
    assert 0 < begun["training"] < summary["train_seconds"] and begun["elapsed"] < summary["elapsed_seconds"]
    assert begun["selection"] < summary["selection_seconds"]
    assert not (tmp_path / "cut" / "checkpoints").exists()  # a finished run needs none


def test_the_correction_of_the_budget_goes_on(tmp_path):
    with pytest.raises(Cut):
        run(tmp_path / "cut", CuttingData(14), correct_budget=True, interval=1)
    before = rows(tmp_path / "cut" / "selections.csv")
    run(tmp_path / "cut", make_small_data(), correct_budget=True, interval=1)
    after = rows(tmp_path / "cut" / "selections.csv")
    for one, other in zip(before, after, strict=False):
        assert (one["correction"], one["slowdown"]) == (other["correction"], other["slowdown"])
    count = len(models.tensor_names(make_small_model()))
    corrections = [float(row["correction"]) for row in after[::count]]
    assert corrections[0] == 1 and corrections[2] != 1


def test_the_last_two_checkpoints_are_kept_and_a_damaged_one_is_passed_over(tmp_path, capsys, unbroken):
    with pytest.raises(Cut):
        run(tmp_path / "cut", CuttingData(9))
    paths = sorted((tmp_path / "cut" / "checkpoints").iterdir())
    assert [path.name for path in paths] == ["step-0000000008.npz", "step-0000000009.npz"]
    whole = paths[1].read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", bytes([whole[0] ^ 1]) + whole[1:], _flipped(whole)):
        paths[1].write_bytes(damaged)
        checkpoint = Checkpoints(paths[1].parent).latest()
        assert checkpoint is not None and checkpoint.state["history"]["step"] == 8
        assert "step-0000000009.npz is damaged" in capsys.readouterr().err
    weights, _ = run(tmp_path / "cut", make_small_data())
    for one, other in zip(unbroken[1], weights, strict=True):
        np.testing.assert_array_equal(one, other)


def _flipped(whole):
    """One bit of an array's data changed."""
    middle = whole.index(b"model/3.npy") + 300
    return whole[:middle] + bytes([whole[middle] ^ 4]) + whole[middle + 1 :]


def test_when_every_checkpoint_is_damaged_it_says_so(tmp_path):
    with pytest.raises(Cut):
        run(tmp_path / "cut", CuttingData(9))
    for path in (tmp_path / "cut" / "checkpoints").iterdir():
        path.write_bytes(b"")
    with pytest.raises(UserError, match=r"every checkpoint in it is damaged; begin anew with --overwrite"):
        run(tmp_path / "cut", make_small_data())
    assert len(list((tmp_path / "cut" / "checkpoints").iterdir())) == 2


def test_a_checkpoint_that_cannot_be_written_leaves_the_old_ones(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    for step in (1, 2):
        checkpoints.save(step, {"weights": np.arange(9)}, {"step": step})

    def full_disk(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full_disk)
    with pytest.raises(UserError, match=r"step-0000000003\.npz: cannot be written: No space left on device"):
        checkpoints.save(3, {"weights": np.arange(9)}, {"step": 3})
    assert len(list(checkpoints.folder.iterdir())) == 2 and checkpoints.latest().state == {"step": 2}


def test_time_alone_asks_for_a_checkpoint(tmp_path):
    for minutes, expected in ((0.0, 2), (10.0, 0)):
        folder = tmp_path / f"{minutes:g}"
        with pytest.raises(Cut):
            run(folder, CuttingData(9), checkpoint_steps=None, checkpoint_minutes=minutes)
        assert len(list(folder.glob("checkpoints/*"))) == expected


def test_weights_that_are_not_finite_never_replace_a_good_checkpoint(tmp_path):
    class Poisoned(CuttingData):
        def take(self, count):
            for images, labels in super().take(count):
                yield (images * np.nan if self._step == 9 else images), labels

    with pytest.raises(UserError, match=r"the loss is nan at step 9 with learning rate 0.0\d+; lower --learning_rate"):
        run(tmp_path / "run", Poisoned(99))
    checkpoint = Checkpoints(tmp_path / "run" / "checkpoints").latest()
    assert checkpoint.state["history"]["step"] == 8
    assert all(np.isfinite(value).all() for value in checkpoint.arrays.values())


def test_a_checkpoint_of_another_network_is_refused(tmp_path):
    with pytest.raises(Cut):
        run(tmp_path / "cut", CuttingData(9))
    with pytest.raises(UserError, match="--resume: the checkpoint is of another network or optimizer"):
        run(tmp_path / "cut", make_small_data(), optimizer="adam")


def test_a_stop_between_test_batches_is_resumed_with_the_test(tmp_path, unbroken):
    data = make_small_data()
    folder = tmp_path / "run"
    calls = []

    class StoppingLog(RunLog):
        def __init__(self, *args):
            super().__init__(*args)
            check = self.stop.check

            def counting():
                calls.append(1)
                if len(calls) == 2 * STEPS + STEPS + 2:  # in the test of the second epoch
                    self.stop.number = signal.SIGTERM
                check()

            self.stop.check = counting

    model = make_small_model()
    settings = Settings(learning_rate=0.05, num_epochs=EPOCHS, interval=0.5, rho=0.6, correct_budget=False)
    folder.mkdir()
    with StoppingLog(folder, {"seed": 0}, models.tensor_names(model)) as log:
        budget = train.make_budget(model, data, settings, make_table(model))
        with pytest.raises(Stopped, match=r"stopped after step 12 of 24; go on with: python main.py --resume"):
            train.elastic_training(model, data, settings, log, budget)
    assert Checkpoints(folder / "checkpoints").latest().state["history"]["step"] == 2 * STEPS
    weights, summary = run(folder, data)
    assert summary["epochs"] == EPOCHS
    for one, other in zip(unbroken[1], weights, strict=True):
        np.testing.assert_array_equal(one, other)


# --- the command line -------------------------------------------------------------------------------------------------

NETWORK = ["--model_name", str(ROOT / "tests" / "zoo.py") + ":branches", "--input_size", "16", "--batch_size", "4"]


def start(*arguments):
    words = [sys.executable, ROOT / "main.py", *NETWORK, "--train_type", "full_training", *map(str, arguments)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(path_pattern, folder, process, seconds=120):
    end = time.monotonic() + seconds
    while not list(folder.glob(path_pattern)):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_with_a_checkpoint_and_tells_how_to_resume(number, status, tmp_path):
    flags = ["--logdir", tmp_path, "--run_name", "mine", "--deterministic", "--num_epochs", "3", "--save_model"]
    process = start(*flags, "--checkpoint_steps", "20")
    wait_for("mine/checkpoints/*.npz", tmp_path, process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == status, errors
    last = errors.strip().splitlines()[-1]
    assert last.startswith("main.py: stopped after step ") and "Traceback" not in errors
    command = last.split("python main.py ")[1].split()
    assert not list((tmp_path / "mine").rglob(".*"))

    other = start(*flags, "--resume", "--learning_rate", "0.5")
    _, errors = other.communicate(timeout=120)
    assert other.returncode == 2 and "was begun with --learning_rate 0.002, not 0.5" in errors.strip().splitlines()[-1]

    resumed = subprocess.run(
        [sys.executable, ROOT / "main.py", *command], capture_output=True, text=True, timeout=300, check=False
    )
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads((tmp_path / "mine" / "summary.json").read_text())["steps"] == 3 * 224
    whole = start(*flags[:2], "--run_name", "whole", *flags[4:])
    assert whole.wait(timeout=300) == 0
    assert weights_of(tmp_path / "mine") == weights_of(tmp_path / "whole")

    again = start(*flags, "--resume")
    output, errors = again.communicate(timeout=60)
    assert again.returncode == 0 and "is finished: accuracy" in output, errors


def weights_of(folder):
    """All weights of last.keras, as bytes."""
    import keras

    model = keras.models.load_model(folder / "last.keras")
    return [variable.numpy().tobytes() for variable in model.variables]


def test_a_second_signal_leaves_at_once():
    program = """
import os, signal, time, utils
with utils.StopSignals() as stop:
    os.kill(os.getpid(), signal.SIGTERM)
    end = time.monotonic() + 5
    while stop.number is None and time.monotonic() < end:
        time.sleep(0.01)
    assert stop.number == signal.SIGTERM
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(30)
"""
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, timeout=60, check=False)
    assert done.returncode == 130 and time.monotonic() - begin < 15


def test_signals_do_what_they_did_before_and_after(monkeypatch):
    before = signal.getsignal(signal.SIGINT)
    with utils.StopSignals() as stop:
        assert signal.getsignal(signal.SIGINT) is not before
        stop.check()
    assert signal.getsignal(signal.SIGINT) is before


def test_two_runs_cannot_write_one_folder(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    program = f"""
import time, utils
from pathlib import Path
with utils.run_folder(Path({str(tmp_path)!r}), "mine", resume=True):
    print("held", flush=True)
    time.sleep(60)
"""
    holder = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        for how in ({"resume": True}, {"overwrite": True}):
            with (
                pytest.raises(UserError, match="another run is writing there; wait for it, or give --run_name"),
                utils.run_folder(tmp_path, "mine", **how),
            ):
                pass
        with utils.run_folder(tmp_path, "mine") as other:
            assert other.name == "mine-2"
    finally:
        holder.kill()
        holder.wait()
    with utils.run_folder(tmp_path, "mine", resume=True):  # the lock died with its holder
        assert (tmp_path / "mine" / "config.json").exists()


def test_half_written_files_of_a_killed_run_are_cleared_away(tmp_path):
    folder = tmp_path / "mine"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    left = [folder / ".123.metrics.csv", folder / "checkpoints" / ".123.step-0000000001.npz"]
    kept = [folder / ".gitignore", folder / "notes.txt"]
    for path in left + kept:
        path.touch()
    with utils.run_folder(tmp_path, "mine", resume=True):
        assert not any(path.exists() for path in left) and all(path.exists() for path in kept)


def test_a_folder_that_holds_no_run_is_not_resumed_into(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with (
        pytest.raises(UserError, match=r"--resume: .* is not the folder of a run"),
        utils.run_folder(tmp_path, "mine", resume=True),
    ):
        pass


@pytest.mark.skipif(os.name != "posix", reason="needs limits of the system")
def test_a_disk_that_fills_up_ends_in_one_line_and_keeps_the_checkpoints(tmp_path):
    """The system itself refuses: files may not grow beyond a limit that two checkpoints keep and the model does not."""
    flags = ["--logdir", tmp_path, "--run_name", "mine", "--checkpoint_steps", "10"]
    process = start(*flags)
    wait_for("mine/checkpoints/*.npz", tmp_path, process)
    process.kill()
    process.communicate()
    [*_, newest] = sorted((tmp_path / "mine" / "checkpoints").glob("step-*"))
    size = newest.stat().st_size
    limit = f"import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({size - 1}, {size - 1}))"
    program = f"{limit}; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    words = [sys.executable, "-c", program, ROOT / "main.py", "--resume", tmp_path / "mine"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
    assert done.returncode == 2, done.stderr
    assert "cannot be written: File too large" in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert newest.exists() and Checkpoints(newest.parent).latest() is not None


def test_a_log_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    process = start("--logdir", tmp_path / "file", "--max_steps", "2")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert f"{tmp_path / 'file'}: cannot be written: Not a directory" in errors.strip().splitlines()[-1]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_log_folder_is_named(tmp_path):
    (tmp_path / "logs").mkdir(mode=0o555)
    with (
        pytest.raises(UserError, match=r"logs: cannot be written: Permission denied"),
        utils.run_folder(tmp_path / "logs", "mine"),
    ):
        pass
