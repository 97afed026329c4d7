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
import os
import socket
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import partialmethod
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import keras
import numpy as np
import tensorflow as tf

import utils
from elastic_trainer import ElasticTraining, freeze_batch_norm
from elastic_trainer.cli.parser import OneLineParser
from elastic_trainer.errors import UserError, first_line
from elastic_trainer.files import reading
from elastic_trainer.timing import measuring, profiling

# Most give three batches of data.
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
rng, slices = np.random.default_rng(0), tf.data.Dataset.from_tensor_slices
NAMES: dict[str, Any] = {  # what the lines of `SCRIPTS` and the scripts find
    "noise": lambda *shape: rng.random(shape, np.float32),
    "whole": lambda below, *shape: rng.integers(0, below, shape),
    "classes": lambda count, rows: np.eye(count, dtype=np.float32)[rng.integers(0, count, rows)],
    "batches": lambda size, *parts: slices(parts if parts[1:] else parts[0]).batch(size),
    **{"keras": keras, "np": np, "tf": tf, "__name__": "__main__"},
}


def bound(statement: Any) -> set[str]:
    """Names that an import, a definition or an assignment binds."""
    targets = ast.walk(ast.Tuple(getattr(statement, "targets", [])))
    imported = {each.asname or each.name for each in getattr(statement, "names", [])}
    return imported | {each.id for each in targets if isinstance(each, ast.Name)} | {getattr(statement, "name", "")}


def replaced(program: str, given: str) -> list[ast.stmt]:
    """The statements of a script, with those of `given`, an entry of `SCRIPTS`, in their places."""
    lines, statements = ast.parse(given).body, []
    names = set().union(*map(bound, lines)) - {""}
    for statement in ast.parse(program).body:
        found = bound(statement) & names
        end = next((place for place, line in enumerate(lines, start=1) if bound(line) & found), 0)
        statements += lines[:end] if found else [statement]
        lines = lines[end:]
    return statements


def run_script(program: str, given: str, rho: float, folder: str) -> tuple[list[dict[str, Any]], list[str]]:
    """What each `fit` of a script did, plain if `rho` is 0, and what failed in the script."""
    os.chdir(tempfile.mkdtemp(dir=folder))
    os.environ.update(XDG_CACHE_HOME=folder, MPLBACKEND="agg")
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    socket.getaddrinfo = keras.utils.get_file = None  # type: ignore[assignment]  # nothing is downloaded
    measuring.CALIBRATION, measuring.MAX_ROUNDS = measuring.QUICK_CALIBRATION, measuring.MIN_ROUNDS
    profiling.MAX_TRACED = profiling.MIN_TRACED
    keras.config.set_max_epochs(2)
    keras.utils.set_random_seed(0)
    tf.config.experimental.enable_op_determinism()
    fits: list[dict[str, Any]] = []
    failed = []
    keras.Model.fit = partialmethod(recorded_fit, keras.Model.fit, rho, fits)
    for statement in replaced(program, given):
        try:
            exec(compile(ast.Module([statement], []), "script", "exec"), NAMES)
        except Exception as error:
            if not isinstance(error, NameError):  # those follow from others
                failed.append(f"line {statement.lineno}: {first_line(error)}")
    return fits, failed


def recorded_fit(model: keras.Model, fit: Any, rho: float, fits: list[dict[str, Any]], *args: Any, **more: Any) -> Any:
    """`fit`, as `run_script` says, with what it did added to `fits`."""
    freeze_batch_norm(model)
    if not model.built:  # else its variables are made in the first step
        model.predict(args[0] if args else more["x"], steps=1)
    elastic, record = ElasticTraining(rho or 1, interval=1), {"model": model.name, "said": []}
    elastic._say = record["said"].append  # type: ignore[method-assign]
    fits.append(record)
    before = [variable.numpy() for variable in model.trainable_variables]
    callbacks = [*(more.pop("callbacks", None) or []), *([elastic] if rho else [])]
    try:
        history = fit(model, *args, **more, callbacks=callbacks)
    except UserError as error:
        record["said"].append(f"refused: {error}")
        raise
    after = [variable.numpy() for variable in model.trainable_variables]
    record["moved"] = [not np.array_equal(*pair) for pair in zip(before, after, strict=True)]
    record["results"] = history.history, [each.tobytes() for each in after]
    with contextlib.suppress(UserError):  # there is no history if it left the fit alone
        record["selected"] = [selection.mask for selection in elastic.history.selections]
    return history


def verdict(plain: dict[str, Any], one: dict[str, Any]) -> str:
    """What ElasticTraining did in a fit, whose plain run is `plain`; with numbers of tensors at each selection."""
    if "selected" not in one:  # refused, or left alone
        return one["said"][-1]
    if np.greater(one["moved"], np.any(one["selected"], axis=0)).any():
        return "tensors moved that were not selected"
    if one["results"] == plain["results"]:
        return "equal"
    if np.greater(plain["moved"], one["selected"]).any():
        return f"{' and '.join(str(mask.sum()) for mask in one['selected'])} of {sum(plain['moved'])}"
    losses, expected = one["results"][0]["loss"], plain["results"][0]["loss"]
    return f"losses differ by up to {np.max(np.abs(np.divide(losses, expected) - 1)):.0e}"


def main() -> None:
    parser = OneLineParser(prog="try_examples.py", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder examples of a checkout of keras-io")
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="scripts whose path contains one")
    args = parser.parse_args()
    print("| script | fit | tensors | ρ = 1 | ρ = 0.5 |\n|---|---|---|---|---|")
    for name in (name for name in SCRIPTS if any(word in name for word in args.only)):
        with reading(path := args.folder / f"{name}.py"):
            program = path.read_text(encoding="utf-8")
        runs = []
        with tempfile.TemporaryDirectory() as folder:
            for rho in (0, 1, 0.5):  # this process has imported TensorFlow, and made nothing with it
                with ProcessPoolExecutor(1, get_context("fork")) as pool:
                    runs.append(pool.submit(run_script, program, SCRIPTS[name], rho, folder).result())
        for plain, *others in zip(*(fits for fits, _ in runs), strict=False):
            cells = [plain["model"], str(len(plain["moved"])), *(verdict(plain, one) for one in others)]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)
        if len({len(fits) for fits, _ in runs}) > 1 or not runs[0][0]:
            print(f"| {name} | failed: {sorted({one for _, failed in runs for one in failed})} | | | |", flush=True)


if __name__ == "__main__":
    utils.run_cli(main)
