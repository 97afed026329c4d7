"""board_train.py in an environment that has NumPy, Pillow and LiteRT only."""

import importlib.util
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import time
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from conftest import SIZE, make_small_model
from small_boards import NAMES, changed_copy, replace_in, result_of, run, upper_mask, weights_of

import data
from elastic_trainer.board.export import export_training, load_board
from elastic_trainer.engine.feature_sums import SHRINKAGES, FeatureSums, fit_head, held_back, held_losses
from elastic_trainer.networks.saved_model import load_model
from elastic_trainer.networks.tensors import tensor_names
from elastic_trainer.runs.trainer import Trainer
from elastic_trainer.selection.schemes import FixedScheme
from elastic_trainer.settings import Settings
from elastic_trainer.system.errors import UserError
from elastic_trainer.system.files import write_json

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ai_edge_litert") is None, reason="ai-edge-litert is not installed"
)
pytest_plugins = ["small_boards"]


def test_a_board_trains_as_the_training_loop_does(three_wheels, photos, tmp_path):
    model = make_small_model()
    next(layer for layer in model.layers if isinstance(layer, keras.layers.Dropout)).rate = 0.0
    settings = Settings(
        dataset_name="image_folder",
        data_dir=photos,
        test_fraction=0.25,
        augment="flip",
        input_size=SIZE,
        num_epochs=3,
        batch_size=6,
        learning_rate=0.05,
        gradient_clipping=0.05,
        warmup=0.2,
        micro_batch=4,
        seed=5,
    )
    mask = upper_mask(model)
    export_training(model, mask, settings, NAMES, tmp_path / "board")
    run(three_wheels, tmp_path / "board", "--data_dir", photos, "--output", tmp_path / "out")
    found = result_of(tmp_path / "out")
    trainer = Trainer(model, data.load(settings), FixedScheme(mask), settings)
    trainer.run()
    assert len(found["epochs"]) == 3 and found["steps"] == trainer.history.step
    for row, expected in zip(found["epochs"], trainer.history.epochs, strict=True):
        for name, value in row.items():
            assert value == pytest.approx(expected[name], rel=1e-3), name


def test_what_a_board_trained_becomes_a_keras_model_that_predicts_the_same(trained, exported, tmp_path):
    from ai_edge_litert.interpreter import Interpreter

    assert result_of(trained)["best_accuracy"] > 0.9  # three colours
    assert {path.name for path in trained.iterdir()} == {"model.tflite", "weights.npz", "result.json"}
    for name in ("board.json", "start.keras"):
        (tmp_path / name).write_bytes((exported / name).read_bytes())
    (tmp_path / "weights.npz").write_bytes((trained / "weights.npz").read_bytes())
    assert "board.keras" in load_board(tmp_path / "weights.npz")
    model, start = load_model(tmp_path / "board.keras", "--weights"), load_model(exported / "start.keras", "--weights")
    pairs = [*zip(tensor_names(model), model.trainable_variables, start.trainable_variables, strict=True)]
    moved = {name for name, now, before in pairs if not np.array_equal(now.numpy(), before.numpy())}
    assert moved == {name for name in tensor_names(model) if "stem" not in name}
    fixed = zip(model.non_trainable_variables, start.non_trainable_variables, strict=True)
    assert all(np.array_equal(now.numpy(), before.numpy()) for now, before in fixed if "seed" not in now.path)
    images = np.random.default_rng(1).uniform(0, 255, (5, SIZE, SIZE, 3)).astype(np.float32)
    expected = model(images, training=False).numpy()
    for file in (trained / "model.tflite", tmp_path / "board.tflite"):
        interpreter = Interpreter(model_path=str(file))
        interpreter.allocate_tensors()
        for image, logits in zip(images, expected, strict=True):
            interpreter.set_tensor(interpreter.get_input_details()[0]["index"], image[None])
            interpreter.invoke()
            found = interpreter.get_tensor(interpreter.get_output_details()[0]["index"])[0]
            np.testing.assert_allclose(found, logits, rtol=1e-4, atol=1e-4)
    assert (tmp_path / "labels.txt").read_text().split() == NAMES


def assert_as_unbroken(output, trained):
    for name, value in weights_of(trained).items():
        np.testing.assert_array_equal(weights_of(output)[name], value)
    assert result_of(output)["epochs"] == result_of(trained)["epochs"]


def every_step_saved(exported, folder, pause=0.0):
    """A copy of the program that writes a checkpoint after each step, and pauses after it."""
    changed_copy(exported, folder, "board_device.py", "CHECKPOINT_SECONDS = 120", "CHECKPOINT_SECONDS = 0")
    replace_in(folder / "board_run.py", "        self.saved = ", f"        time.sleep({pause}); self.saved = ")
    return folder


def wait_for_checkpoint(output, earlier=None):
    """Wait until there is another checkpoint than the `earlier` one; returns when it was written."""
    path, deadline = output / "checkpoint.npz", time.monotonic() + 60
    while not path.exists() or path.stat().st_mtime_ns == earlier:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return path.stat().st_mtime_ns


def test_a_run_that_signals_stop_ends_as_an_unbroken_one_bit_for_bit(three_wheels, exported, photos, trained, tmp_path):
    output, slow, moment = tmp_path / "out", every_step_saved(exported, tmp_path / "slow", 0.1), None
    words = [three_wheels, slow / "board_train.py", "--data_dir", photos, "--output", output, "--resume"]
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGPWR):
        with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
            wait_for_checkpoint(output, moment)
            process.send_signal(number)
            assert process.wait(60) == 128 + number
            moment = (output / "checkpoint.npz").stat().st_mtime_ns
            assert re.search(r"stopped after step \d+; continue with --resume", process.communicate()[1])
        assert (output / "weights.npz").exists() and (output / "model.tflite").exists(), "there is a model at once"
    refused = run(three_wheels, exported, "--data_dir", photos, "--output", output, code=2)
    assert "unfinished run" in refused.stderr and "--resume" in refused.stderr
    run(three_wheels, exported, "--data_dir", photos, "--output", output, "--resume")
    assert_as_unbroken(output, trained)


def test_a_lost_terminal_leaves_a_checkpoint_and_nohup_goes_on(three_wheels, exported, photos, trained, tmp_path):
    """The kernel sends SIGHUP where an ssh connection is lost, and the terminal takes no more text."""
    slow = every_step_saved(exported, tmp_path / "slow", 0.1)
    given = (slow / "board_train.py", "--data_dir", photos, "--output", tmp_path / "out")
    words = [*map(str, (three_wheels, *given))]
    process, terminal = pty.fork()
    if process == 0:
        os.execv(words[0], words)
    wait_for_checkpoint(tmp_path / "out")
    os.close(terminal)
    os.waitpid(process, 0)
    run(three_wheels, exported, *words[2:], "--resume")
    assert_as_unbroken(tmp_path / "out", trained)
    words[-1] = str(tmp_path / "ignoring")
    with subprocess.Popen(["nohup", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as ignoring:
        wait_for_checkpoint(tmp_path / "ignoring")
        ignoring.send_signal(signal.SIGHUP)
        assert ignoring.wait(60) == 0
    assert_as_unbroken(tmp_path / "ignoring", trained)


def test_photos_that_were_read_before_a_power_cut_are_not_read_again(three_wheels, exported, photos, trained, tmp_path):
    loop = "        for start in range(before, count, self.part):\n"
    kill = "            if start == 40: os.kill(os.getpid(), 9)\n"
    killed = changed_copy(exported, tmp_path / "killed", "board_photos.py", loop, loop + kill)
    run(three_wheels, killed, "--data_dir", photos, "--output", tmp_path / "out", code=-9)
    says = changed_copy(exported, tmp_path / "says", "board_photos.py", loop, "        print('from', before)\n" + loop)
    done = run(three_wheels, says, "--data_dir", photos, "--output", tmp_path / "out", "--resume")
    assert "from 40" in done.stdout
    assert_as_unbroken(tmp_path / "out", trained)


@pytest.mark.parametrize("epoch", [2, 4])
def test_a_run_that_is_killed_while_it_validates_validates_that_epoch_again(
    epoch, three_wheels, exported, photos, trained, tmp_path
):
    output, folder = tmp_path / "out", every_step_saved(exported, tmp_path / "board")
    at = '        steps = state["step"] - self.epoch_steps * len(state["epochs"])\n'
    killed = f"        if len(state['epochs']) == {epoch - 1}: import signal; signal.raise_signal(9)\n"
    replace_in(folder / "board_run.py", at, killed + at)
    run(three_wheels, folder, "--data_dir", photos, "--output", output, code=-9)
    run(three_wheels, exported, "--data_dir", photos, "--output", output, "--resume")
    assert_as_unbroken(output, trained)


def test_weights_of_another_export_are_refused(trained, exported, tmp_path):
    with pytest.raises(UserError, match=r"needs start.keras and board.json beside it"):
        load_board(trained / "weights.npz")
    for name in ("board.json", "start.keras"):
        (tmp_path / name).write_bytes((exported / name).read_bytes())
    np.savez(tmp_path / "weights.npz", id=np.array("other"), **weights_of(trained))
    with pytest.raises(UserError, match="is of another export"):
        load_board(tmp_path / "weights.npz")
    content = (trained / "weights.npz").read_bytes()
    np.savez(tmp_path / "few.npz", id=np.array(json.loads((exported / "board.json").read_text())["id"]))
    place = content.index(b"PK\x01\x02") + 6  # the version of zip that is needed
    later = content[:place] + b"\xad" + content[place + 1 :]
    for damaged in (b"", b"text", content[:-200], content[:200] + b"?" * 90 + content[290:], b"PK\x03\x04", later):
        (tmp_path / "weights.npz").write_bytes(damaged)
        with pytest.raises(UserError, match=r".*weights.npz: "):
            load_board(tmp_path / "weights.npz")
    with pytest.raises(UserError, match=r"few.npz: is damaged, or no weights.npz of a board"):
        load_board(tmp_path / "few.npz")
    record = json.loads((tmp_path / "board.json").read_text())
    write_json(tmp_path / "board.json", {**record, "format": 2})
    with pytest.raises(UserError, match=r"board.json: is damaged or of another version; copy the folder"):
        load_board(tmp_path / "weights.npz")


def test_a_board_reports_on_the_test_folder_what_a_validation_folder_has_chosen(
    three_wheels, exported, photos, tmp_path
):
    divided, name = tmp_path / "photos", "Dev-set"
    for place, first, end in (("train", 0, 12), (name, 12, 15), ("test", 15, 20)):
        for label in NAMES:
            (divided / place / label).mkdir(parents=True)
            for k in range(first, end):
                source = photos / (NAMES[NAMES.index(label) - 1] if place == "test" else label)  # tests fail
                shutil.copy(source / f"{k}.png", divided / place / label)
    done = run(three_wheels, exported, "--data_dir", divided, "--output", tmp_path / "out")
    said = (
        f"{divided}/train trains, {divided}/{name} chooses the best model, {divided}/test is reported once at the end"
    )
    assert said in done.stdout and "36 photos to train on, 9 to choose the best model by, 15 to test on" in done.stdout
    result = result_of(tmp_path / "out")
    assert result["test_accuracy"] < 0.4 < 0.6 < result["best_accuracy"]
    assert f"test accuracy {result['test_accuracy']:.1%} on 15 photos not used to choose it" in done.stdout


def test_a_head_fitted_in_blocks_is_that_of_all_photos(board_modules, monkeypatch):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 80)
    features = (rng.normal(0, 2, (3, 7))[labels] + rng.normal(size=(80, 7))).astype(np.float32)
    state = {"weights_0": rng.normal(size=(7, 3)).astype(np.float32), "weights_1": np.zeros(3, np.float32)}
    added = [0.0]

    def infer(rows):
        read = features[rows]
        return {"head_inputs": read, "logits": read @ state["weights_0"] + state["weights_1"] + added[0]}

    network = SimpleNamespace(part=4, call=lambda name: state, infer=infer)
    train = rng.permutation(80)[:66]
    examples = SimpleNamespace(train=train, labels=labels, read=lambda rows, views: rows)
    monkeypatch.setattr(board_modules.head, "BLOCK", 16)
    head, is_better, is_scaled, loss = board_modules.head.fit(network, examples, [0, 1], lambda: True)
    expected = fit_head(features[train], labels[train], 3)
    for found, wanted in zip(head, expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)
    assert is_better and is_scaled.all()
    is_held = held_back(labels[train])
    held, others = train[is_held], train[~is_held]
    heads = FeatureSums.of(features[others], labels[others], 3).heads(SHRINKAGES)
    assert loss == pytest.approx(held_losses(heads, features[held], labels[held]).min() / len(held), rel=1e-3)
    state.update(weights_0=30 * head.kernel, weights_1=30 * head.bias)
    assert not board_modules.head.fit(network, examples, [0, 1], lambda: True)[1], "surer, and rightly so"
    turns = iter([True] * 10)
    assert board_modules.head.fit(network, examples, [0, 1], lambda: next(turns, False)) is None, "out of time"
    added[0] = 1.0
    assert board_modules.head.fit(network, examples, [0, 1], lambda: True) is None, "something follows the layer"
