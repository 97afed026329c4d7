"""A run that was cut off goes on from its last checkpoint and ends as if nothing had happened."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import pytest
from conftest import make_small_data, make_small_model, make_table
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import train
from elastic_trainer.networks.tensors import tensor_names
from elastic_trainer.runs.checkpoint import Checkpoint, Checkpoints
from elastic_trainer.runs.clocks import CLOCKS
from elastic_trainer.runs.folder import run_folder
from elastic_trainer.runs.run_log import RunLog
from elastic_trainer.runs.stop_signals import StopSignals
from elastic_trainer.selection.schemes import make_budget
from elastic_trainer.selection.time_budget import GRADIENT_PASSES, RhoBudget
from elastic_trainer.settings import Settings
from elastic_trainer.training.state import TrainState
from utils import Stopped, UserError

ROOT = Path(__file__).resolve().parents[2]
EPOCHS, STEPS = 3, 6  # of the runs below


class Cut(BaseException):
    """Stands for a power cut: nothing catches it."""


class CuttingData:
    """The small data; cuts the run off when step `at` is about to begin, or in the test after it."""

    def __init__(self, at, in_test=False):
        self._data, self._at, self._in_test, self._step = make_small_data(), at, in_test, 0

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


def run(folder, data, elastic=False, t_dy_ms=1.0, **changes):
    """One run, or what is left of it; its weights and summary. Elastic ones select twice an epoch."""
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
    with RunLog(folder, {"seed": 0}, tensor_names(model)) as log:
        if elastic:
            budget = make_budget(model, data, settings, make_table(model, t_dy_ms))
            results = train.elastic_training(model, data, settings, log, budget)
        else:
            results = train.full_training(model, data, settings, log)
        summary = log.finish(results)
    return [variable.numpy() for variable in model.variables], summary


def latest(folder) -> Checkpoint:
    """The newest checkpoint that is whole; there must be one."""
    checkpoint = Checkpoints(folder).latest()
    assert checkpoint is not None
    return checkpoint


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
    return folder, *run(folder, make_small_data(), elastic=True)


@pytest.fixture(scope="module")
def unbroken_weights(tmp_path_factory):
    """Of full training."""
    return run(tmp_path_factory.mktemp("unbroken") / "run", make_small_data())[0]


@pytest.mark.parametrize(
    ("optimizer", "cuts", "every"),
    [
        ("sgd", [(1, False), (STEPS, False)], 1),  # after the first step, and between two epochs
        ("sgd", [(9, False), (2 * STEPS, True)], 1),  # before a selection in the middle of an epoch, and in a test
        ("sgd", [(10, False), (10, False), (17, False)], 4),  # some way after a checkpoint, again before the next
        ("sgd", [(2, False)], 100),  # before the first checkpoint
        ("adam", [(10, False), (14, False)], 4),
    ],
)
def test_a_resumed_run_ends_as_an_unbroken_one(optimizer, cuts, every, tmp_path, unbroken):
    folder, weights, summary = unbroken
    if optimizer == "adam":
        folder = tmp_path / "unbroken"
        weights, summary = run(folder, make_small_data(), optimizer="adam", elastic=True)
    for at, in_test in cuts:
        with pytest.raises(Cut):
            run(tmp_path / "cut", CuttingData(at, in_test), optimizer=optimizer, checkpoint_steps=every, elastic=True)
    resumed, resumed_summary = run(
        tmp_path / "cut", make_small_data(), optimizer=optimizer, checkpoint_steps=every, elastic=True
    )
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


def test_a_resumed_prunetrain_run_has_the_network_that_was_left(tmp_path, capsys):
    def prunetrain(folder, data):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((8, 8, 3))
        x = keras.layers.Rescaling(1 / 255)(inputs)
        for name in ("first", "second"):  # Keras' own names count on within one process
            x = keras.layers.Conv2D(32, 3, padding="same", activation="relu", name=name)(x)
        x = keras.layers.Dropout(0.2, seed=0)(keras.layers.GlobalAveragePooling2D()(x))
        model = keras.Model(inputs, keras.layers.Dense(3, name="head")(x))
        settings = Settings(
            learning_rate=0.01, num_epochs=3, prune_interval=1, prune_threshold=1.0, checkpoint_steps=1, save_model=True
        )
        folder.mkdir(exist_ok=True)
        with RunLog(folder, {}, tensor_names(model)) as log:
            log.finish(train.prunetrain(model, data, settings, log))
        return [variable.numpy() for variable in keras.models.load_model(folder / "last.keras").variables]

    whole = prunetrain(tmp_path / "whole", make_small_data())
    assert whole[0].shape[-1] < 32 and "channels left" in capsys.readouterr().out
    for at, in_test in ((8, False), (12, True)):
        with pytest.raises(Cut):
            prunetrain(tmp_path / "cut", CuttingData(at, in_test))
    for one, other in zip(whole, prunetrain(tmp_path / "cut", make_small_data()), strict=True):
        np.testing.assert_array_equal(one, other)


def test_events_of_a_resumed_run_have_no_gap_and_no_overlap(tmp_path, unbroken):
    for at, in_test in [(2, False), (10, False), (2 * STEPS, True)]:
        with pytest.raises(Cut):
            run(tmp_path / "cut", CuttingData(at, in_test), checkpoint_steps=4, elastic=True)
    run(tmp_path / "cut", make_small_data(), checkpoint_steps=4, elastic=True)
    expected, found = events_of(unbroken[0]), events_of(tmp_path / "cut")
    assert set(expected) <= set(found)
    for tag in expected:
        if tag.startswith(("test/", "selection/", "budget/")):
            assert found[tag] == expected[tag], tag
    assert expected["budget/rho"] == [0, 3, 6, 9, 12, 15]
    for tag, steps in found.items():
        assert sorted(set(steps)) == steps, tag
    for tag in ("train/loss", "learning_rate"):  # a point at each selection, checkpoint, and end of an epoch
        assert {*range(3, EPOCHS * STEPS + 1, 3), *range(4, EPOCHS * STEPS, 4)} <= set(found[tag])


def test_the_clocks_go_on(tmp_path):
    with pytest.raises(Cut):
        run(tmp_path / "cut", CuttingData(14))
    before = latest(tmp_path / "cut" / "checkpoints").state["history"]["clocks"]
    time.sleep(0.5)  # a time without power is nobody's
    begin = time.perf_counter()
    _, summary = run(tmp_path / "cut", make_small_data())
    took = time.perf_counter() - begin
    spans = summary["training_spans"]
    assert spans[: len(before["spans"])] == before["spans"] and len(spans) > len(before["spans"])
    for name in (*CLOCKS, "elapsed"):
        seconds, after = before[name], summary[f"{'train' if name == 'training' else name}_seconds"]
        assert 0 < seconds <= after < seconds + took and (seconds < after or name == "selection"), name
    assert not (tmp_path / "cut" / "checkpoints").exists()  # a finished run needs none


def test_the_correction_of_the_budget_goes_on(tmp_path, monkeypatch):
    allowed = []
    original = RhoBudget.allow

    def remembering(self, progress):
        allowed.append(
            (progress.step, self.correction, self._allowed, self._step_over_prediction(progress), progress.slowdowns)
        )
        return original(self, progress)

    monkeypatch.setattr(RhoBudget, "allow", remembering)
    with pytest.raises(Cut):
        run(tmp_path / "cut", CuttingData(11), correct_budget=True, elastic=True)
    interval = latest(tmp_path / "cut" / "checkpoints").state["history"]["intervals"][-1]
    saved = interval["choice"]
    assert saved["correction"] != 1 and interval["slowdowns"]
    allowed.clear()
    run(tmp_path / "cut", make_small_data(), correct_budget=True, elastic=True)
    step, correction, rho, paces, slowdowns = allowed[0]
    assert (step, correction, rho) == (12, saved["correction"], saved["rho"]) and rho != 0.6
    # Steps and gradient passes before the cut are not forgotten (the first step after it has no time).
    assert len(paces) == len(interval["step_ms"]) > 0
    assert [*slowdowns[:2]] == interval["slowdowns"] and len(slowdowns) == 3


def test_what_was_held_against_another_timing_table_is_measured_again(tmp_path, monkeypatch, capsys):
    allowed = []
    original = RhoBudget.allow

    def remembering(self, progress):
        allowed.append(progress.slowdowns)
        return original(self, progress)

    with pytest.raises(Cut):
        run(tmp_path / "cut", CuttingData(11), correct_budget=True, elastic=True)
    old = latest(tmp_path / "cut" / "checkpoints").state["history"]["intervals"][-1]["slowdowns"]
    monkeypatch.setattr(RhoBudget, "allow", remembering)
    run(tmp_path / "cut", make_small_data(), correct_budget=True, elastic=True, t_dy_ms=1.5)
    assert "the timing table has changed since the checkpoint" in capsys.readouterr().out
    assert len(allowed[0]) == GRADIENT_PASSES[0] and not {*allowed[0]} & {*old}
    assert len(allowed[1]) == 3  # from then on those among the interval's three steps


def test_the_last_two_checkpoints_are_kept_and_a_damaged_one_is_passed_over(tmp_path, capsys, unbroken_weights):
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
    for one, other in zip(unbroken_weights, weights, strict=True):
        np.testing.assert_array_equal(one, other)


def _flipped(whole):
    """One bit of the data of an array changed: the stem's kernel, 432 bytes behind numpy's header of 128."""
    middle = whole.index(b"NUMPY", whole.index(b"model/0.npy")) + 300
    return whole[:middle] + bytes([whole[middle] ^ 4]) + whole[middle + 1 :]


def test_when_every_checkpoint_is_damaged_it_says_so(tmp_path):
    with pytest.raises(Cut):
        run(tmp_path / "cut", CuttingData(9))
    for path in (tmp_path / "cut" / "checkpoints").iterdir():
        path.write_bytes(b"")
    with pytest.raises(UserError, match=r"every checkpoint in it is damaged; start again with --overwrite"):
        run(tmp_path / "cut", make_small_data())
    assert len(list((tmp_path / "cut" / "checkpoints").iterdir())) == 2


def test_a_checkpoint_that_cannot_be_written_leaves_the_old_ones(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    for step in (1, 2):
        checkpoints.save(step, {"weights": np.arange(9)}, {"step": step})

    def full_disk(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np.lib.format, "write_array", full_disk)
    with pytest.raises(UserError, match=r"step-0000000003\.npz: cannot be written: No space left on device"):
        checkpoints.save(3, {"weights": np.arange(9)}, {"step": 3})
    assert len(list(checkpoints.folder.iterdir())) == 2 and latest(checkpoints.folder).state["step"] == 2


def test_time_alone_asks_for_a_checkpoint(tmp_path):
    for minutes, expected in ((0.0, 2), (10.0, 0)):
        folder = tmp_path / f"{minutes:g}"
        with pytest.raises(Cut):
            run(folder, CuttingData(9), checkpoint_steps=None, checkpoint_minutes=minutes)
        assert len(list(folder.glob("checkpoints/*"))) == expected


def test_weights_that_are_not_finite_never_replace_a_good_checkpoint(tmp_path):
    """A weight becomes infinite after step 9: that step's own checkpoint is not written, nor any later."""
    model = make_small_model()

    class Poisoned(CuttingData):
        def take(self, count):
            for batch in super().take(count):
                if self._step == 9:
                    model.get_layer("head").bias.assign([np.inf, 0, 0])
                yield batch

    settings = Settings(learning_rate=0.05, num_epochs=EPOCHS, checkpoint_steps=1)
    with (
        RunLog(tmp_path, {"seed": 0}, tensor_names(model)) as log,
        pytest.raises(UserError, match=r"the loss is nan at step 9 with learning rate 0.0\d+; lower --learning_rate"),
    ):
        train.full_training(model, Poisoned(99), settings, log)  # type: ignore[arg-type]
    checkpoint = latest(tmp_path / "checkpoints")
    assert checkpoint.state["history"]["step"] == 8
    assert all(np.isfinite(value).all() for value in checkpoint.arrays.values())


def test_a_checkpoint_with_a_weight_that_is_not_finite_is_not_written(tmp_path):
    model = make_small_model()

    class Poisoned(CuttingData):
        def take(self, count):
            for batch in super().take(count):
                if self._step == 9:
                    stem = model.get_layer("stem").kernel  # relu makes 0 of what comes of it
                    stem.assign(np.full(stem.shape, np.nan))
                yield batch

    settings = Settings(learning_rate=0.05, num_epochs=EPOCHS, checkpoint_steps=1)
    with (
        RunLog(tmp_path, {"seed": 0}, tensor_names(model)) as log,
        pytest.raises(
            UserError, match=r"a weight is not finite after step 9 with learning rate 0.0\d+; lower --learning_rate"
        ),
    ):
        train.traditional_tl_training(model, Poisoned(99), settings, log)  # type: ignore[arg-type]
    assert latest(tmp_path / "checkpoints").state["history"]["step"] == 8


def test_a_checkpoint_of_another_network_is_refused(tmp_path):
    with pytest.raises(Cut):
        run(tmp_path / "cut", CuttingData(9))
    with pytest.raises(UserError, match="--resume: the checkpoint is of another network or optimizer"):
        run(tmp_path / "cut", make_small_data(), optimizer="adam")


def test_a_run_is_not_resumed_on_other_data(tmp_path):
    with pytest.raises(Cut):
        run(tmp_path / "cut", CuttingData(9))
    with pytest.raises(UserError, match=r"started with \[24, 24\] training and test images, now they are \[28, 28\]"):
        run(tmp_path / "cut", make_small_data(count=28))


def test_a_damaged_checkpoint_takes_no_ones_place(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, {"weights": np.arange(9)}, {})
    damaged = tmp_path / "step-0000000002.npz"
    damaged.write_bytes(b"PK")
    again = Checkpoints(tmp_path)
    again.latest()
    again.save(3, {"weights": np.arange(9)}, {})
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-0000000001.npz", "step-0000000003.npz"]


def test_a_checkpoint_of_another_version_is_refused(tmp_path, monkeypatch):
    Checkpoints(tmp_path).save(1, {}, {})
    monkeypatch.setattr("elastic_trainer.runs.checkpoint.VERSION", 999)
    with pytest.raises(UserError, match="was written by another version of this program"):
        Checkpoints(tmp_path).latest()


def test_bfloat16_comes_back_as_bfloat16(tmp_path):
    model = make_small_model()
    keras.config.set_dtype_policy("bfloat16")
    try:
        half = make_small_model()
    finally:
        keras.config.set_dtype_policy("float32")
    optimizer = train.make_optimizer("sgd", 0.1, 0.0, 10)
    optimizer.build(half.trainable_variables)
    state = TrainState(half, optimizer, 4)
    assert half.trainable_variables[0].dtype == "bfloat16" != model.trainable_variables[0].dtype
    Checkpoints(tmp_path).save(1, state.values(), {})
    before = [variable.numpy().copy() for variable in half.variables]
    for variable in half.trainable_variables:
        variable.assign(variable * 2 + 1)
    state.assign(latest(tmp_path).arrays)
    for variable, old in zip(half.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), old)


def test_a_stop_between_test_batches_is_resumed_with_the_test(tmp_path, unbroken_weights):
    data = make_small_data()
    folder = tmp_path / "run"
    calls = []

    class CountingSignals(StopSignals):
        def check(self):
            calls.append(1)
            if len(calls) == 2 * STEPS + STEPS + 2:  # in the test of the second epoch
                self.number = signal.SIGTERM
            super().check()

    model = make_small_model()
    settings = Settings(learning_rate=0.05, num_epochs=EPOCHS, interval=0.5, rho=0.6, correct_budget=False)
    folder.mkdir()
    with (
        RunLog(folder, {"seed": 0}, tensor_names(model)) as log,
        CountingSignals() as stop,
        pytest.raises(Stopped, match=r"stopped after step 12 of 18; go on with: python main.py --resume"),
    ):
        train.full_training(model, data, settings, log, stop=stop)
    assert latest(folder / "checkpoints").state["history"]["step"] == 2 * STEPS
    weights, summary = run(folder, data)
    assert summary["epochs"] == EPOCHS
    for one, other in zip(unbroken_weights, weights, strict=True):
        np.testing.assert_array_equal(one, other)


# --- the command line -------------------------------------------------------------------------------------------------

NETWORK = ["--model_name", str(ROOT / "tests" / "zoo.py") + ":branches", "--input_size", "16", "--batch_size", "4"]


def start(*arguments):
    words = [sys.executable, str(ROOT / "main.py"), *NETWORK, "--train_type", "full_training", *map(str, arguments)]
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
    wait_for("mine/checkpoints/step-*", tmp_path, process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == status, errors
    last = errors.strip().splitlines()[-1]
    assert last.startswith("main.py: stopped after step ") and "Traceback" not in errors
    command = last.split("python main.py ")[1].split()
    assert not list((tmp_path / "mine").rglob(".*"))
    if number == signal.SIGINT:  # what comes now is the same
        return

    other = start(*flags, "--resume", "--learning_rate", "0.5")
    _, errors = other.communicate(timeout=120)
    assert (
        other.returncode == 2 and "was started with --learning_rate 0.002, not 0.5" in errors.strip().splitlines()[-1]
    )

    resumed = subprocess.run(
        [sys.executable, ROOT / "main.py", *command], capture_output=True, text=True, timeout=300, check=False
    )
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads((tmp_path / "mine" / "summary.json").read_text())["steps"] == 3 * 224
    whole = start(*flags[:2], "--run_name", "whole", *flags[4:])
    whole.communicate(timeout=300)
    assert whole.returncode == 0
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
with StopSignals() as stop:
    os.kill(os.getpid(), signal.SIGTERM)
    end = time.monotonic() + 5
    while stop.number is None and time.monotonic() < end:
        time.sleep(0.01)
    assert stop.number == signal.SIGTERM
    os.kill(os.getpid(), signal.SIGTERM)  # at the same moment: sent twice, meant once
    time.sleep(1.5)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(30)
"""
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, timeout=60, check=False)
    assert done.returncode == 130 and time.monotonic() - begin < 15


def test_signals_do_what_they_did_before_and_after():
    def handlers():
        wakeup = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(wakeup)
        return [wakeup, *map(signal.getsignal, (signal.SIGINT, signal.SIGTERM))]

    before = handlers()
    with StopSignals() as stop:
        assert not any(one is other for one, other in zip(handlers(), before, strict=True))
        stop.check()
    assert handlers() == before


def test_two_runs_cannot_write_one_folder(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    program = f"""
import time, utils
from pathlib import Path
with run_folder(Path({str(tmp_path)!r}), "mine", resume=True):
    print("held", flush=True)
    time.sleep(60)
"""
    holder = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        for how in ({"resume": True}, {"overwrite": True}):
            with (
                pytest.raises(UserError, match="another run is writing there; wait for it, or give --run_name"),
                run_folder(tmp_path, "mine", **how),
            ):
                pass
        with run_folder(tmp_path, "mine") as other:
            assert other.name == "mine-2"
    finally:
        holder.kill()
        holder.wait()
    with run_folder(tmp_path, "mine", resume=True):  # the lock died with its holder
        assert (tmp_path / "mine" / "config.json").exists()


def test_half_written_files_of_a_killed_run_are_cleared_away(tmp_path):
    folder = tmp_path / "mine"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    left = [folder / ".123.metrics.csv", folder / "checkpoints" / ".123.step-0000000001.npz"]
    kept = [folder / ".gitignore", folder / "notes.txt"]
    for path in left + kept:
        path.touch()
    with run_folder(tmp_path, "mine", resume=True):
        assert not any(path.exists() for path in left) and all(path.exists() for path in kept)


def test_a_folder_that_holds_no_run_is_not_resumed_into(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with (
        pytest.raises(UserError, match=r"--resume: .* is not the folder of a run"),
        run_folder(tmp_path, "mine", resume=True),
    ):
        pass


@pytest.mark.skipif(os.name != "posix", reason="needs limits of the system")
def test_a_disk_that_fills_up_ends_in_one_line_and_keeps_the_checkpoints(tmp_path):
    """The system itself refuses: files may not grow beyond a limit that two checkpoints keep and the model does not."""
    flags = ["--logdir", tmp_path, "--run_name", "mine", "--checkpoint_steps", "10"]
    process = start(*flags)
    wait_for("mine/checkpoints/step-*", tmp_path, process)
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
    assert f"--logdir {tmp_path / 'file'}: is a file; give a folder" in errors.strip().splitlines()[-1]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_log_folder_is_named(tmp_path):
    (tmp_path / "logs").mkdir(mode=0o555)
    with (
        pytest.raises(UserError, match=r"logs: cannot be written: Permission denied"),
        run_folder(tmp_path / "logs", "mine"),
    ):
        pass
