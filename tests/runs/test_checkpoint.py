"""Checkpoints: the last two are kept, damaged ones are skipped, bad weights are never saved."""

import resource

import numpy as np
import pytest
from conftest import make_small_data, make_small_model
from interrupted_runs import EPOCHS, InterruptingData, PowerCut, latest, run

import train
from elastic_trainer.networks.tensors import tensor_names
from elastic_trainer.runs.checkpoint import Checkpoints, State
from elastic_trainer.runs.run_log import RunLog
from elastic_trainer.settings import Settings
from elastic_trainer.system.errors import UserError


@pytest.mark.parametrize(
    ("scheme", "layer", "message"),
    [
        (train.full_training, "head", r"the loss is nan at step 9 with learning rate 0.0\d+; lower --learning_rate"),
        # The ReLU after the stem turns NaN into 0, so the loss stays finite.
        (
            train.traditional_tl_training,
            "stem",
            r"a weight is not finite after step 9 with learning rate 0.0\d+;",
        ),
    ],
)
@pytest.mark.usefixtures("tick_after_each_step")
def test_a_weight_that_is_not_finite_stops_the_run_and_keeps_the_last_good_checkpoint(scheme, layer, message, tmp_path):
    """Before step 9 a weight becomes NaN: neither that step nor a later one gets a checkpoint."""
    model = make_small_model()

    class Poisoned(InterruptingData):
        def train(self, *arguments):
            for batch in super().train(*arguments):
                if self._step == 9:
                    kernel = model.get_layer(layer).kernel
                    kernel.assign(np.full(kernel.shape, np.nan))
                yield batch

    settings = Settings(learning_rate=0.05, num_epochs=EPOCHS, checkpoint_minutes=0)
    with RunLog(tmp_path, {"seed": 0}, tensor_names(model)) as log, pytest.raises(UserError, match=message):
        scheme(model, Poisoned(99), settings, log)
    checkpoint = latest(tmp_path / "checkpoints")
    assert checkpoint.record["history"]["step"] == 8
    assert all(np.isfinite(value).all() for value in checkpoint.arrays.values())


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


def test_a_checkpoint_whose_list_of_arrays_is_damaged_is_skipped(tmp_path, capsys):
    """A comment of 256 bytes in zip's list hides what is listed after it."""
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, State({"a": np.arange(3), "b": np.arange(4)}, {"step": step}))
    path = tmp_path / "step-0000000002.npz"
    content = bytearray(path.read_bytes())
    entry = content.index(b"PK\x01\x02", content.index(b"PK\x01\x02") + 1)
    content[entry + 33] = 1
    path.write_bytes(content)
    found = Checkpoints(tmp_path).latest()
    assert found is not None and found.record["step"] == 1 and [*found.arrays] == ["a", "b"]
    assert f"{path} is damaged (arrays are missing)" in capsys.readouterr().err


def test_checkpoint_of_another_version_is_refused(tmp_path, monkeypatch):
    Checkpoints(tmp_path).save(1, State({}, {}))
    monkeypatch.setattr("elastic_trainer.runs.checkpoint.VERSION", 999)
    with pytest.raises(UserError, match=r"written by another version .*start again without --resume"):
        Checkpoints(tmp_path).latest()


def test_file_size_limit_ends_the_run_in_one_line_and_keeps_the_checkpoints(tmp_path):
    """The system limits the size of files: below that of a checkpoint."""
    with pytest.raises(PowerCut):
        run(tmp_path / "run", InterruptingData(9))
    [*_, newest] = sorted((tmp_path / "run" / "checkpoints").iterdir())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (newest.stat().st_size - 1, limits[1]))
    try:
        with pytest.raises(UserError, match=r"step-0000000010\.npz: cannot be written: File too large$"):
            run(tmp_path / "run", make_small_data())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert latest(newest.parent).record["history"]["step"] == 9


def test_a_listener_that_fails_at_the_start_is_reported_as_it_is(tmp_path, monkeypatch):
    """The progress bar is not shown yet."""

    def full_disk(*_):
        raise UserError("metrics.csv: cannot be written: No space left on device")

    monkeypatch.setattr(RunLog, "on_train_begin", full_disk)
    with pytest.raises(UserError, match="No space left on device"):
        run(tmp_path / "run", make_small_data())
