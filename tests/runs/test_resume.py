"""A resumed run continues from its last checkpoint and ends like an uninterrupted run."""

import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import make_small_data
from interrupted_runs import EPOCHS, STEPS, InterruptingData, PowerCut, latest, run
from small_runs import rows_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from elastic_trainer.runs.stop_signals import StopSignals
from elastic_trainer.selection.budget import GRADIENT_PASSES, RhoBudget
from elastic_trainer.system.errors import Stopped, UserError


def events_of(folder):
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    events.Reload()
    tags = [*events.Tags()["tensors"]]
    curves = [f"{split}/{what}" for split in ("train", "test") for what in ("loss", "accuracy")]
    wanted = {"budget/rho", "budget/slowdown", "budget/correction", "learning_rate", "selection/tensors_by_epoch"}
    wanted |= {"step_time/measured_ms", "step_time/budget_ms", *curves}
    assert wanted <= {*tags}
    return {tag: [event.step for event in events.Tensors(tag)] for tag in tags}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    return folder, *run(folder, make_small_data(), elastic=True)


@pytest.fixture(scope="module")
def uninterrupted_weights(tmp_path_factory):
    """The weights after full training."""
    return run(tmp_path_factory.mktemp("uninterrupted") / "run", make_small_data())[0]


@pytest.mark.parametrize(
    ("optimizer", "cuts", "every"),
    [
        # After the first step; between two epochs; before a selection within an epoch; in a validation.
        ("sgd", [(1, False), (STEPS, False), (9, False), (2 * STEPS, True)], 1),
        # Before the first checkpoint; between two checkpoints, twice; later again.
        ("adam", [(2, False), (10, False), (10, False), (17, False)], 4),
    ],
)
def test_resumed_run_ends_with_the_weights_tables_and_events_of_an_uninterrupted_run(
    optimizer, cuts, every, tmp_path, uninterrupted
):
    folder, weights, summary = uninterrupted
    if optimizer == "adam":
        folder = tmp_path / "uninterrupted"
        weights, summary = run(folder, make_small_data(), optimizer="adam", elastic=True)
    changes = {"optimizer": optimizer, "every": every, "elastic": True}
    for at, in_validation in cuts:
        with pytest.raises(PowerCut):
            run(tmp_path / "resumed", InterruptingData(at, in_validation), **changes)
    resumed, resumed_summary = run(tmp_path / "resumed", make_small_data(), **changes)
    for one, other in zip(weights, resumed, strict=True):
        np.testing.assert_array_equal(one, other)
    assert (resumed_summary["steps"], resumed_summary["epochs"]) == (EPOCHS * STEPS, EPOCHS)
    assert resumed_summary["best_accuracy"] == summary["best_accuracy"]
    for name, columns in (
        ("metrics", ["epoch", "step", "learning_rate", "train_loss", "train_accuracy", "test_loss", "trained_tensors"]),
        ("selections", ["epoch", "step", "name", "importance", "chosen", "budget_step_ms"]),
    ):
        pairs = zip(rows_of(folder / f"{name}.csv"), rows_of(tmp_path / "resumed" / f"{name}.csv"), strict=True)
        for expected, found in pairs:
            assert [expected[column] for column in columns] == [found[column] for column in columns]
    seconds = [float(row["train_seconds"]) for row in rows_of(tmp_path / "resumed" / "metrics.csv")]
    assert sorted(seconds) == seconds and seconds[-1] == pytest.approx(resumed_summary["train_seconds"])
    check_events(events_of(folder), events_of(tmp_path / "resumed"))


def test_a_run_whose_steps_start_from_features_is_resumed_as_if_unbroken(tmp_path):
    changes = {"elastic": True, "interval": 2, "feature_cache": "float32"}
    weights, summary = run(tmp_path / "unbroken", make_small_data(), **changes)
    assert summary["feature_seconds"] > 0
    for at in (2 * STEPS, STEPS + 1):  # at a selection, and between the first and a later step
        with pytest.raises(PowerCut):
            run(tmp_path / f"{at}", InterruptingData(at), **changes)
        for one, other in zip(weights, run(tmp_path / f"{at}", make_small_data(), **changes)[0], strict=True):
            np.testing.assert_array_equal(one, other)


class StopsInItsFirstValidation:
    """The small data; a signal comes while the first model is validated."""

    def __init__(self):
        self._data = make_small_data()

    def __getattr__(self, name):
        return getattr(self._data, name)

    def test(self):
        raise Stopped(signal.SIGTERM, "now")


def test_a_run_stopped_before_its_first_step_keeps_its_first_selection(tmp_path, capsys):
    changes = {"elastic": True, "save_model": True, "interval": 2}
    with pytest.raises(Stopped, match="stopped after step 0 of 18"):
        run(tmp_path / "resumed", StopsInItsFirstValidation(), **changes)
    weights, _ = run(tmp_path / "unbroken", make_small_data(), **changes)
    resumed, _ = run(tmp_path / "resumed", make_small_data(), **changes)
    for one, other in zip(weights, resumed, strict=True):
        np.testing.assert_array_equal(one, other)
    steps = [{row["step"] for row in rows_of(tmp_path / name / "selections.csv")} for name in ("unbroken", "resumed")]
    rows = [len(rows_of(tmp_path / name / "selections.csv")) for name in ("unbroken", "resumed")]
    assert steps == [{"0", "12"}] * 2 and rows[0] == rows[1], "it selects once for each step"


def check_events(expected, found):
    """Curves have no gap; what was written after a checkpoint is there twice."""
    assert set(expected) <= set(found)
    for tag in expected:
        if tag.startswith(("test/", "selection/", "budget/")):
            assert {*found[tag]} == {*expected[tag]}, tag
    assert expected["budget/rho"] == [0, 3, 6, 9, 12, 15]
    for tag in ("train/loss", "learning_rate"):  # a point at the end of each epoch, and about two a second
        assert {*range(STEPS, EPOCHS * STEPS + 1, STEPS)} <= set(found[tag])


def test_what_does_not_fit_a_run_is_refused_and_it_then_continues_its_clocks(tmp_path):
    folder = tmp_path / "resumed"
    with pytest.raises(PowerCut):
        run(folder, InterruptingData(14))
    before = latest(folder / "checkpoints").record["history"]["clocks"]
    with pytest.raises(UserError, match="--resume: the checkpoint is of another network or optimizer"):
        run(folder, make_small_data(), optimizer="adam")
    with pytest.raises(UserError, match=r"started with \[24, 24\] training and test examples, now they are \[28, 28\]"):
        run(folder, make_small_data(count=28))
    time.sleep(0.5)  # the time without power must not be counted
    start = time.perf_counter()
    _, summary = run(folder, make_small_data())
    took, spans = time.perf_counter() - start, summary["training_spans"]
    assert spans[: len(before["spans"])] == before["spans"] and len(spans) > len(before["spans"])
    for name in ("training", "selection", "validation", "elapsed"):
        seconds, after = before[name], summary[f"{'train' if name == 'training' else name}_seconds"]
        assert 0 < seconds <= after < seconds + took and (seconds < after or name == "selection"), name
    assert summary["epochs"] == EPOCHS
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-0000000018.npz"], "that of its end"


@pytest.mark.parametrize("is_same_table", [True, False])
def test_resumed_run_continues_the_correction_of_the_budget_if_the_table_is_the_same(
    is_same_table, corrected, tmp_path, monkeypatch, capsys
):
    allowed = []
    original = RhoBudget.allow

    def recording(self, progress):
        allowed.append((progress.step, self.correction, self.rho, len(progress.step_ms), [*progress.slowdowns]))
        return original(self, progress)

    shutil.copytree(corrected, tmp_path / "resumed")
    saved = latest(corrected / "checkpoints").record["history"]["selections"][-1]
    assert saved["correction"] != 1 and saved["slowdowns"]
    monkeypatch.setattr(RhoBudget, "allow", recording)
    t_dy_ms = 1.0 if is_same_table else 1.5
    run(tmp_path / "resumed", make_small_data(), deterministic=False, elastic=True, t_dy_ms=t_dy_ms)
    step, correction, rho, steps, slowdowns = allowed[0]
    if is_same_table:
        assert (step, correction, rho) == (12, saved["correction"], saved["rho"]) and rho != 0.6
        # Steps and gradient passes before the power cut count (the first step after it is not timed).
        assert steps == len(saved["step_ms"]) > 0
        assert slowdowns == saved["slowdowns"] and len(slowdowns) == 1
    else:
        assert "the timing table has changed since the checkpoint" in capsys.readouterr().out
        assert len(slowdowns) == GRADIENT_PASSES[0] and not {*slowdowns} & {*saved["slowdowns"]}
        assert len(allowed[1][4]) == 1  # after that, only the pass during the interval's three steps


@pytest.fixture(scope="module")
def corrected(tmp_path_factory):
    """The folder of a run that corrects its budget, interrupted before its last selections."""
    folder = tmp_path_factory.mktemp("corrected") / "run"
    with pytest.raises(PowerCut):
        run(folder, InterruptingData(11), deterministic=False, elastic=True)
    return folder


def test_a_run_killed_before_its_first_checkpoint_says_that_it_starts_again(tmp_path, capsys):
    for deadline in (None, 1e6):
        folder = tmp_path / f"{deadline}"
        changes = {"elastic": deadline is not None, "deadline": deadline}
        with pytest.raises(PowerCut):
            run(folder, InterruptingData(0), **changes)
        assert "has no checkpoint" not in capsys.readouterr().out
        with pytest.raises(PowerCut):
            run(folder, InterruptingData(0), **changes)
        line = f"--resume: {folder} has no checkpoint yet; the run starts again"
        assert capsys.readouterr().out.splitlines()[0] == line + (
            "" if deadline is None else ", and its --deadline counts from now"
        )


def test_run_stopped_during_validation_resumes_with_that_validation(tmp_path, uninterrupted_weights, monkeypatch):
    folder, calls = tmp_path / "run", []

    def check(self):
        calls.append(1)
        if len(calls) == 2 * (STEPS + 2):  # in the validation of the second epoch
            raise Stopped(signal.SIGTERM)

    monkeypatch.setattr(StopSignals, "check", check)
    with pytest.raises(Stopped, match=r"stopped after step 12 of 18; continue with: python main.py --resume"):
        run(folder, make_small_data())
    assert latest(folder / "checkpoints").record["history"]["step"] == 2 * STEPS
    weights, summary = run(folder, make_small_data())
    assert summary["epochs"] == EPOCHS
    for one, other in zip(uninterrupted_weights, weights, strict=True):
        np.testing.assert_array_equal(one, other)


def test_last_two_checkpoints_are_kept_and_a_damaged_one_is_skipped(tmp_path, capsys, uninterrupted_weights):
    with pytest.raises(PowerCut):
        run(tmp_path / "resumed", InterruptingData(9))
    paths = sorted((tmp_path / "resumed" / "checkpoints").iterdir())
    assert [path.name for path in paths] == ["step-0000000008.npz", "step-0000000009.npz"]
    content = bytearray(paths[1].read_bytes())
    content[content.index(b"NUMPY", content.index(b"model/0.npy")) + 300] ^= 4  # in the stem's kernel
    paths[1].write_bytes(content)
    assert latest(paths[1].parent).record["history"]["step"] == 8
    assert "step-0000000009.npz is damaged" in capsys.readouterr().err
    older = paths[0].read_bytes()
    for path in paths:
        path.write_bytes(b"")
    with pytest.raises(UserError, match=r"every checkpoint is damaged; .*start again without --resume"):
        run(tmp_path / "resumed", make_small_data())
    assert sorted(paths[0].parent.iterdir()) == paths, "they are kept"
    paths[0].write_bytes(older)
    weights, _ = run(tmp_path / "resumed", make_small_data())
    for one, other in zip(uninterrupted_weights, weights, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_run_that_saves_since_it_was_resumed_keeps_the_best_of_the_epochs_since(tmp_path, monkeypatch):
    accuracies = [0.9, 0.5]
    monkeypatch.setattr(
        "elastic_trainer.engine.features.Evaluation.__call__",
        lambda *_: {"loss": 1.0, "accuracy": accuracies.pop(0)},
    )
    best = tmp_path / "run" / "best.keras"
    with pytest.raises(PowerCut):
        run(tmp_path / "run", InterruptingData(STEPS + 1), save_model=False)
    assert not best.exists()
    with pytest.raises(PowerCut):
        run(tmp_path / "run", InterruptingData(2 * STEPS + 1), save_model=True)
    second = best.read_bytes()
    for third, is_better in ((0.7, True), (0.4, False)):
        folder = Path(shutil.copytree(tmp_path / "run", tmp_path / f"{third}"))
        accuracies.append(third)
        run(folder, make_small_data(), save_model=True)
        assert ((folder / "best.keras").read_bytes() != second) == is_better
