#!/usr/bin/env python
"""Run scripts of Keras' own examples with and without `ElasticTraining`, on made-up data: what does it do to them?

    python scripts/tools/try_examples.py ../keras-io/examples --only vision/cct graph

Each script runs plain, at rho 1 and at rho 0.5, in processes of its own. Every `fit` takes two epochs, with frozen
batch norm. A script's statements run one by one. Those that fail are passed over, such as pictures and downloads. Those
that bind a name which `SCRIPTS` gives are replaced by the lines there, one after the other, and then left out.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import multiprocessing
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import keras
import numpy as np
import tensorflow as tf

import utils
from elastic_trainer import ElasticTraining, freeze_batch_norm
from elastic_trainer.cli.parser import OneLineParser
from elastic_trainer.errors import UserError
from elastic_trainer.options import whole_number
from elastic_trainer.timing import measuring, profiling

MODES = ("plain", "1", "0.5")
# Most give three batches of data. `noise` is in 0…1, `whole(n, …)` in 0…n-1, `classes` is one-hot.
SCRIPTS = {
    "vision/knowledge_distillation": "x_train, y_train = noise(96, 28, 28, 1), whole(10, 96)",
    "vision/image_classification_efficientnet_fine_tuning": """
IMG_SIZE, NUM_CLASSES = 32, 3
EfficientNetB0 = lambda **more: keras.applications.EfficientNetB0(**{**more, "weights": None})
ds_train = ds_test = batches(8, noise(24, 32, 32, 3), classes(3, 24))""",
    "vision/image_classification_from_scratch": """
image_size = (64, 64); train_ds = val_ds = batches(8, noise(24, 64, 64, 3), whole(2, 24, 1))""",
    "vision/captcha_ocr": """
characters = [*map(str, range(10))]
train_dataset = validation_dataset = batches(8, {"image": noise(24, 200, 50, 1), "label": whole(10, 24, 5)})""",
    "vision/siamese_contrastive": """
x_train_1 = x_val_1 = noise(48, 28, 28, 1); x_train_2 = x_val_2 = noise(48, 28, 28, 1)
labels_train = labels_val = whole(2, 48)""",
    "vision/attention_mil_classification": """
train_data = val_data = [noise(6, 28, 28) for _ in range(3)]; train_labels = val_labels = np.arange(6)[:, None] % 2""",
    "vision/oxford_pets_image_segmentation": """
img_size = (64, 64); train_dataset = valid_dataset = batches(8, noise(24, 64, 64, 3), whole(3, 24, 64, 64, 1))""",
    "vision/super_resolution_sub_pixel": """
train_ds = valid_ds = batches(8, noise(24, 32, 32, 1), noise(24, 96, 96, 1))
callbacks = [early_stopping_callback, model_checkpoint_callback]""",
    "vision/conv_lstm": "x_train, x_val, y_train, y_val = [noise(15, 7, 16, 16, 1) for _ in range(4)]",
    "vision/involution": """
input_tensor = noise(2, 32, 32, 3); train_ds = test_ds = batches(32, noise(96, 32, 32, 3), whole(10, 96, 1))""",
    "vision/pointnet": """
NUM_POINTS = 128; train_dataset = validation_dataset = batches(8, noise(24, 128, 3), whole(10, 24))""",
    "vision/cct": "batch_size = 16; x_train, y_train = noise(54, 32, 32, 3), classes(10, 54)",
    "vision/3D_image_classification": """
train_dataset = validation_dataset = batches(2, noise(6, 48, 48, 48, 1), whole(2, 6, 1))
model = get_model(width=48, height=48, depth=48)""",
    "timeseries/timeseries_classification_from_scratch": "x_train, y_train = noise(120, 64, 1), whole(2, 120)",
    "timeseries/timeseries_traffic_forecasting": """
route_distances = 9000 * noise(26, 26); speeds_array = noise(400, 26)""",
    "timeseries/eeg_signal_classification": """
num_classes = 2; train_dataset = test_dataset = batches(16, noise(48, 512, 1), classes(2, 48))
weight_dict = {0: 0.5, 1: 0.5}""",
    "timeseries/timeseries_anomaly_detection": "x_train = noise(420, 288, 1)",
    "structured_data/collaborative_filtering_movielens": """
num_users = num_movies = 60; x_train, x_val, y_train, y_val = [whole(60, 192, 2)] * 2 + [noise(192)] * 2""",
    "structured_data/imbalanced_classification": "features = noise(7680, 30); targets = whole(2, 7680, 1)",
    "structured_data/deep_neural_decision_forests": """
CATEGORICAL_FEATURES_WITH_VOCABULARY = dict.fromkeys("education occupation race gender".split(), [*"abcdefghi"])
num_trees = 5
get_dataset_from_csv = lambda *_, **__: batches(
    32, {name: whole(9, 96) if name in lookup_dict else noise(96) for name in FEATURE_NAMES}, whole(2, 96))""",
    "audio/ctc_asr": """
train_dataset = validation_dataset = batches(4, noise(12, 50, 193), whole(28, 12, 5))
model = build_model(193, 29, rnn_layers=2, rnn_units=32); validation_callback = keras.callbacks.Callback()""",
    "audio/speaker_recognition_using_cnn": """
class_names = ["ann", "bob"]; train_ds = valid_ds = batches(8, noise(24, 8000, 1), whole(2, 24))""",
    "nlp/addition_rnn": "TRAINING_SIZE = 100; epochs = 3",
    "nlp/lstm_seq2seq": """
num_encoder_tokens = num_decoder_tokens = 12
encoder_input_data = noise(240, 8, 12); decoder_input_data = decoder_target_data = noise(240, 9, 12)""",
    "graph/gnn_citations": """
batch_size = 64; num_features = 1433; num_classes = 3; x_train = whole(2, 226, 1433); y_train = whole(3, 226)
graph_info = (noise(300, 1433), whole(300, 2, 1600), tf.ones(1600)); x_train = np.arange(226)""",
}


def made_up_data() -> dict[str, Any]:
    """The functions that the lines of `SCRIPTS` call."""
    rng, slices = np.random.default_rng(0), tf.data.Dataset.from_tensor_slices
    return {
        "noise": lambda *shape: rng.random(shape, np.float32),
        "whole": lambda below, *shape: rng.integers(0, below, shape),
        "classes": lambda count, rows: np.eye(count, dtype=np.float32)[rng.integers(0, count, rows)],
        "batches": lambda size, *parts: slices(parts if parts[1:] else parts[0]).batch(size),
        **{"keras": keras, "np": np, "tf": tf, "__name__": "__main__"},
    }


def bound(statement: ast.stmt) -> set[str]:
    """Names that a statement binds."""
    if isinstance(statement, (ast.Assign, ast.AugAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return {name.id for each in targets for name in ast.walk(each) if isinstance(name, ast.Name)}
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return {one.asname or one.name for one in statement.names}
    return {statement.name} if isinstance(statement, (ast.FunctionDef, ast.ClassDef)) else set()


def run_statements(program: str, given: str) -> list[str]:
    """Run a script as the module's header says; returns what failed, in words."""
    names, lines, failed = made_up_data(), ast.parse(given).body, []
    replaced = set().union(*map(bound, lines))
    for statement in ast.parse(program).body:
        todo = [statement]
        if found := bound(statement) & replaced:
            end = next((place for place, line in enumerate(lines, start=1) if bound(line) & found), 0)
            todo, lines = lines[:end], lines[end:]
        for one in todo:
            try:
                exec(compile(ast.Module([one], []), "script", "exec"), names)
            except Exception as error:
                if not isinstance(error, NameError):  # those follow from others
                    failed.append(f"line {one.lineno}: {str(error).strip().partition(chr(10))[0]}")
    return failed


def run_script(program: str, given: str, mode: str, cache: str, place: str) -> tuple[list[dict[str, Any]], list[str]]:
    """What each `fit` of a script did, and what failed in it."""
    os.chdir(place)
    os.environ.update(XDG_CACHE_HOME=cache, MPLBACKEND="agg")
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    socket.getaddrinfo = keras.utils.get_file = None  # type: ignore[assignment]  # nothing is downloaded
    measuring.CALIBRATION, measuring.MAX_ROUNDS = measuring.QUICK_CALIBRATION, measuring.MIN_ROUNDS
    profiling.MAX_TRACED = profiling.MIN_TRACED
    keras.config.set_max_epochs(2)
    keras.utils.set_random_seed(0)
    tf.config.experimental.enable_op_determinism()
    fit, fits = keras.Model.fit, []

    def recorded_fit(model: keras.Model, *args: Any, callbacks: Any = None, **more: Any) -> Any:
        freeze_batch_norm(model)
        if not model.built:  # else its variables are made in the first step
            model.predict(args[0] if args else more["x"], steps=1)
        before: list[np.ndarray] = []
        start = keras.callbacks.LambdaCallback(on_train_begin=lambda _: before.extend(values_of(model)))
        elastic = [] if mode == "plain" else [ElasticTraining(float(mode), interval=1)]
        try:
            history = fit(model, *args, **more, callbacks=[start, *(callbacks or []), *elastic])
        except UserError as error:
            fits.append({"refused": str(error)})
            return fit(model, *args, **more, callbacks=callbacks)  # for what follows in the script
        record: dict[str, Any] = {"model": model.name}
        after = values_of(model)
        record["moved"] = [not np.array_equal(*pair) for pair in zip(before, after, strict=True)]
        record["results"] = history.history, hashlib.sha256(b"".join(one.tobytes() for one in after)).hexdigest()
        with contextlib.suppress(UserError):  # there is no history if it left the fit alone
            for each in elastic:
                record["selected"] = np.any([one.mask for one in each.history.selections], axis=0).tolist()
        fits.append(record)
        return history

    keras.Model.fit = recorded_fit
    return fits, run_statements(program, given)


def values_of(model: keras.Model) -> list[np.ndarray]:
    return [variable.numpy() for variable in model.trainable_variables]


def in_process(*arguments: Any, seconds: int) -> tuple[list[dict[str, Any]], list[str]]:
    """`run_script` in a copy of this process, which has imported TensorFlow and made nothing with it."""
    with tempfile.TemporaryDirectory() as place, multiprocessing.get_context("fork").Pool(1) as pool:
        try:
            return pool.apply_async(run_script, (*arguments, place)).get(seconds)
        except multiprocessing.TimeoutError:
            return [], [f"takes longer than {seconds} s"]


def verdict(plain: dict[str, Any], one: dict[str, Any]) -> str:
    """What ElasticTraining did in a fit, whose plain run is `plain`."""
    if "refused" in one:
        return f"refused: {one['refused']}"
    if "selected" not in one:
        return "left alone"
    if any(moved > selected for moved, selected in zip(one["moved"], one["selected"], strict=True)):
        return "tensors moved that were not selected"
    if one["moved"] != plain["moved"]:
        return f"{sum(one['moved'])} of {sum(plain['moved'])} moved"
    if one["results"] == plain["results"]:
        return "equal"
    losses, expected = one["results"][0]["loss"], plain["results"][0]["loss"]
    return f"losses differ by up to {np.max(np.abs(np.divide(losses, expected) - 1)):.0e}"


def main() -> None:
    parser = OneLineParser(prog="try_examples.py", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder examples of a checkout of keras-io")
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="scripts whose path contains one")
    parser.add_argument("--seconds", type=whole_number(1, 36000), default=600, help="of a run; default: %(default)s")
    args = parser.parse_args()
    paths = {name: args.folder / f"{name}.py" for name in SCRIPTS if any(word in name for word in args.only)}
    if not any(path.exists() for path in paths.values()):
        raise UserError(f"{args.folder}: has none of the scripts, such as {next(iter(SCRIPTS))}.py")
    print("| script | fit | tensors | ρ = 1 | ρ = 0.5 |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as cache:
        for name, path in paths.items():
            if not path.exists():
                continue
            program = path.read_text(encoding="utf-8")
            runs = [in_process(program, SCRIPTS[name], mode, cache, seconds=args.seconds) for mode in MODES]
            for plain, *others in zip(*(fits for fits, _ in runs), strict=False):
                cells = [plain["model"], str(len(plain["moved"])), *(verdict(plain, one) for one in others)]
                print(f"| {name} | {' | '.join(cells)} |", flush=True)
            if len({len(fits) for fits, _ in runs}) > 1 or not runs[0][0]:
                print(f"| {name} | failed: {sorted({one for _, failed in runs for one in failed})} | | | |", flush=True)


if __name__ == "__main__":
    utils.run_cli(main)
