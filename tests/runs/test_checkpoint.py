"""Checkpoints: the last two are kept, damaged ones are skipped, bad weights are never saved."""

import os
import subprocess
import sys

import numpy as np
import pytest
from command_line import ROOT, start_training, wait_for_file
from conftest import make_small_data, make_small_model
from interrupted_runs import EPOCHS, InterruptingData, PowerCut, latest, run

import train
from elastic_trainer.errors import UserError
from elastic_trainer.networks.tensors import tensor_names
from elastic_trainer.runs.checkpoint import Checkpoints, State
from elastic_trainer.runs.run_log import RunLog
from elastic_trainer.settings import Settings


@pytest.fixture(scope="module")
def uninterrupted_weights(tmp_path_factory):
    """The weights after full training."""
    return run(tmp_path_factory.mktemp("uninterrupted") / "run", make_small_data())[0]


def test_last_two_checkpoints_are_kept_and_a_damaged_one_is_skipped(tmp_path, capsys, uninterrupted_weights):
    with pytest.raises(PowerCut):
        run(tmp_path / "resumed", InterruptingData(9))
    paths = sorted((tmp_path / "resumed" / "checkpoints").iterdir())
    assert [path.name for path in paths] == ["step-0000000008.npz", "step-0000000009.npz"]
    intact = paths[1].read_bytes()
    for damaged in (intact[: len(intact) // 2], b"", bytes([intact[0] ^ 1]) + intact[1:], with_a_flipped_bit(intact)):
        paths[1].write_bytes(damaged)
        checkpoint = Checkpoints(paths[1].parent).latest()
        assert checkpoint is not None and checkpoint.record["history"]["step"] == 8
        assert "step-0000000009.npz is damaged" in capsys.readouterr().err
    weights, _ = run(tmp_path / "resumed", make_small_data())
    for one, other in zip(uninterrupted_weights, weights, strict=True):
        np.testing.assert_array_equal(one, other)


def with_a_flipped_bit(content):
    """Change one bit of an array's data: the stem's kernel, 432 bytes after NumPy's header of 128 bytes."""
    middle = content.index(b"NUMPY", content.index(b"model/0.npy")) + 300
    return content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]


def test_only_damaged_checkpoints_raise_an_error_and_are_kept(tmp_path):
    with pytest.raises(PowerCut):
        run(tmp_path / "resumed", InterruptingData(9))
    for path in (tmp_path / "resumed" / "checkpoints").iterdir():
        path.write_bytes(b"")
    with pytest.raises(UserError, match=r"every checkpoint is damaged; .*--overwrite"):
        run(tmp_path / "resumed", make_small_data())
    assert len(list((tmp_path / "resumed" / "checkpoints").iterdir())) == 2


def test_full_disk_keeps_the_old_checkpoints(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    for step in (1, 2):
        checkpoints.save(step, State({"weights": np.arange(9)}, {"step": step}))

    def full_disk(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np.lib.format, "write_array", full_disk)
    with pytest.raises(UserError, match=r"step-0000000003\.npz: cannot be written: No space left on device"):
        checkpoints.save(3, State({"weights": np.arange(9)}, {"step": 3}))
    assert len(list(checkpoints.folder.iterdir())) == 2 and latest(checkpoints.folder).record["step"] == 2


def test_checkpoint_is_written_after_the_given_minutes(tmp_path):
    for minutes, expected in ((0.0, 2), (10.0, 0)):
        folder = tmp_path / f"{minutes:g}"
        with pytest.raises(PowerCut):
            run(folder, InterruptingData(9), checkpoint_minutes=minutes)
        assert len(list(folder.glob("checkpoints/*"))) == expected


def test_infinite_weight_stops_the_run_and_keeps_the_last_good_checkpoint(tmp_path):
    """A weight becomes infinite before step 9: neither that step nor a later one gets a checkpoint."""
    model = make_small_model()

    class Poisoned(InterruptingData):
        def train(self, *arguments):
            for batch in super().train(*arguments):
                if self._step == 9:
                    model.get_layer("head").bias.assign([np.inf, 0, 0])
                yield batch

    settings = Settings(learning_rate=0.05, num_epochs=EPOCHS, checkpoint_minutes=0)
    with (
        RunLog(tmp_path, {"seed": 0}, tensor_names(model)) as log,
        pytest.raises(UserError, match=r"the loss is nan at step 9 with learning rate 0.0\d+; lower --learning_rate"),
    ):
        train.full_training(model, Poisoned(99), settings, log)  # type: ignore[arg-type]
    checkpoint = latest(tmp_path / "checkpoints")
    assert checkpoint.record["history"]["step"] == 8
    assert all(np.isfinite(value).all() for value in checkpoint.arrays.values())


def test_nan_weight_that_leaves_the_loss_finite_is_not_saved(tmp_path):
    model = make_small_model()

    class Poisoned(InterruptingData):
        def train(self, *arguments):
            for batch in super().train(*arguments):
                if self._step == 9:
                    stem = model.get_layer("stem").kernel  # the ReLU after it turns NaN into 0
                    stem.assign(np.full(stem.shape, np.nan))
                yield batch

    settings = Settings(learning_rate=0.05, num_epochs=EPOCHS, checkpoint_minutes=0)
    with (
        RunLog(tmp_path, {"seed": 0}, tensor_names(model)) as log,
        pytest.raises(
            UserError, match=r"a weight is not finite after step 9 with learning rate 0.0\d+; lower --learning_rate"
        ),
    ):
        train.traditional_tl_training(model, Poisoned(99), settings, log)  # type: ignore[arg-type]
    assert latest(tmp_path / "checkpoints").record["history"]["step"] == 8


def test_damaged_checkpoint_does_not_count_as_one_of_the_two_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, State({"weights": np.arange(9)}, {}))
    damaged = tmp_path / "step-0000000002.npz"
    damaged.write_bytes(b"PK")
    again = Checkpoints(tmp_path)
    again.latest()
    again.save(3, State({"weights": np.arange(9)}, {}))
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-0000000001.npz", "step-0000000003.npz"]


def test_checkpoint_of_another_version_is_refused(tmp_path, monkeypatch):
    Checkpoints(tmp_path).save(1, State({}, {}))
    monkeypatch.setattr("elastic_trainer.runs.checkpoint.VERSION", 999)
    with pytest.raises(UserError, match=r"written by another version .*--overwrite"):
        Checkpoints(tmp_path).latest()


@pytest.mark.skipif(os.name != "posix", reason="needs resource limits")
def test_file_size_limit_ends_the_run_in_one_line_and_keeps_the_checkpoints(tmp_path):
    """The system limits the size of files: below that of a checkpoint."""
    flags = ["--logdir", tmp_path, "--run_name", "mine", "--checkpoint_minutes", "0.02"]
    process = start_training(*flags)
    wait_for_file("mine/checkpoints/step-*", tmp_path, process)
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
