#!/usr/bin/env python
"""Run scripts of Keras' own examples with and without `ElasticTraining`, on made-up data: what does it do to them?

    python scripts/tools/try_examples.py ../keras-io/examples --only vision/cct graph --json examples.json

Each script runs in processes of its own: plain, at rho 1, and at rho 0.5. Every `fit` takes two epochs of at most three
batches. Batch norm is frozen in all of them. `SCRIPTS` says which files a script finds, and what is smaller there.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.abc
import importlib.util
import inspect
import io
import json
import multiprocessing
import os
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import keras
import numpy as np
import tensorflow as tf
from PIL import Image

import utils
from elastic_trainer import ElasticTraining, freeze_batch_norm
from elastic_trainer.cli.parser import OneLineParser
from elastic_trainer.errors import UserError
from elastic_trainer.options import whole_number
from elastic_trainer.timing import measuring, profiling

EPOCHS, BATCHES, COUNT = 2, 3, 24
MODES = ("plain", "1", "0.5")
RNG = np.random.default_rng(0)
FAKE = ["IPython", "gdown", "imageio", "ipywidgets", "jiwer", "networkx", "nibabel", "trimesh"]  # where not installed


Make = Callable[[str], object]  # writes a file


def text(content: str = "") -> Make:
    return lambda path: Path(path).write_text(content, encoding="utf-8")


def picture(*shape: int, low: int = 0, high: int = 256) -> Make:
    return lambda path: Image.fromarray(RNG.integers(low, high, shape, dtype=np.uint8)).save(path)


def sound(path: str) -> None:
    tf.io.write_file(path, tf.audio.encode_wav(RNG.uniform(-0.5, 0.5, (16000, 1)).astype(np.float32), 16000))


def table(rows: int, *columns: Callable[[int], object], header: str = "", separator: str = ",") -> Make:
    """`columns` give the value of a row."""
    lines = [separator.join(str(column(row)) for column in columns) for row in range(rows)]
    return text("\n".join([*([header] if header else []), *lines, ""]))


def whole(low: int = 0, high: int = 2) -> Callable[[int], object]:
    return lambda row: RNG.integers(low, high)


def normal(row: int) -> object:
    return round(RNG.normal(), 3)


def one_of(*values: object) -> Callable[[int], object]:
    return lambda row: values[row % len(values)]


def minute(row: int) -> object:
    return f"2014-04-{1 + row // 288:02} {row // 12 % 24:02}:{row % 12 * 5:02}:00"


PHOTO, SMALLER = picture(48, 48, 3), {"batch_size = 32": "batch_size = 8", "BATCH_SIZE = 32": "BATCH_SIZE = 8"}
EEG = "Unnamed: 0,id,indra_time,browser_latency,reading_time,attention_esense,meditation_esense,createdAt,updatedAt"
CENSUS = "Private/State-gov,Wife/Own,HS-grad/Masters,Divorced/Married,Sales/Tech,Wife/Husband,White/Black,Male/Female"
WORDS = [one_of(*(f" {word}" for word in words.split("/"))) for words in CENSUS.split(",")]
ADULT = [whole(17, 90), WORDS[0], whole(), WORDS[2], whole(1, 16), *WORDS[3:], *[whole(0, 60)] * 3, WORDS[1]]
# By script: the files that it finds (each # stands for COUNT numbers), and texts of it that are replaced.
SCRIPTS: dict[str, tuple[dict[str, Make], dict[str, str]]] = {
    "vision/knowledge_distillation": ({}, {}),
    "vision/image_classification_efficientnet_fine_tuning": (
        {f"stanford_dogs_data/{name}.tar": text() for name in ("images", "lists")}
        | {f"stanford_dogs_data/Images/n{k}-dog/#.jpg": PHOTO for k in range(3)},
        {"IMG_SIZE = 224": "IMG_SIZE = 32", "BATCH_SIZE = 64": "BATCH_SIZE = 24"},
    ),
    "vision/image_classification_from_scratch": (
        {f"PetImages/{name}/#.jpg": PHOTO for name in ("Cat", "Dog")},
        {"(180, 180)": "(64, 64)", "batch_size = 128": "batch_size = 8"},
    ),
    "vision/captcha_ocr": (  # Keras 3.15 takes no tensors for these
        {"captcha_images_v2/2b#mn.png": picture(50, 200)},
        {"ops.ones(": "tf.ones(", "ops.tile(": "tf.tile("},
    ),
    "vision/siamese_contrastive": ({}, {"30000": "400"}),
    "vision/attention_mil_classification": ({}, {"batch_size=1,": "batch_size=4,"}),
    "vision/oxford_pets_image_segmentation": (
        {"images/#.jpg": PHOTO, "annotations/trimaps/#.png": picture(48, 48, low=1, high=4)},
        {**SMALLER, "(160, 160)": "(64, 64)", "val_samples = 1000": "val_samples = 8"},
    ),
    "vision/super_resolution_sub_pixel": (
        {"BSR/BSDS500/data/images/test/#.jpg": PHOTO},
        {"crop_size = 300": "crop_size = 96"},
    ),
    "vision/conv_lstm": ({"moving_mnist.npy": lambda path: np.save(path, RNG.integers(0, 256, (8, 24, 16, 16)))}, {}),
    "vision/involution": ({}, {"(32, 256, 256, 3)": "(2, 32, 32, 3)", ".batch(256)": ".batch(32)"}),
    "vision/pointnet": (
        {f"ModelNet10/{name}/{part}/#.off": text() for name in ("sofa", "bed") for part in ("train", "test")},
        {**SMALLER, "NUM_POINTS = 2048": "NUM_POINTS = 128"},
    ),
    "vision/cct": ({}, {"batch_size = 128": "batch_size = 16"}),
    "vision/3D_image_classification": (
        {f"MosMedData/{name}/#.nii": text() for name in ("CT-0", "CT-23")},
        {"desired_depth = 64": "desired_depth = 48", "width = 128": "width = 48", "height = 128": "height = 48"}
        | {"width=128, height=128, depth=64": "width=48, height=48, depth=48", "[:70]": "[:6]", "[70:]": "[22:]"},
    ),
    "timeseries/timeseries_classification_from_scratch": (
        {f"FordA_{part}.tsv": table(96, one_of(-1, 1), *[normal] * 64, separator="\t") for part in ("TRAIN", "TEST")},
        {},
    ),
    "timeseries/timeseries_traffic_forecasting": (
        {f"PeMSD7_{name}_228.csv": table(800, *[whole(40, 9000)] * 228) for name in "WV"},
        {},
    ),
    "timeseries/eeg_signal_classification": (
        {
            "eeg-data.csv": table(
                120,
                *[whole()] * 9,
                lambda row: f'"{[*range(row, row + 512)]}"',
                one_of("math1", "blink1"),
                whole(0, 20),
                header=f"{EEG},raw_values,label,signal_quality",
            )
        },
        {"layers.Dense(4096": "layers.Dense(256", "2048,": "128,", "BATCH_SIZE = 64": "BATCH_SIZE = 16"},
    ),
    "timeseries/timeseries_anomaly_detection": (
        {
            f"art_daily_{k}.csv": table(900, minute, normal, header="timestamp,value")
            for k in ("small_noise", "jumpsup")
        },
        {},
    ),
    "structured_data/collaborative_filtering_movielens": (
        {
            "ml-latest-small/ratings.csv": table(
                400, whole(1, 30), whole(1, 60), whole(1, 6), header="userId,movieId,rating"
            )
        },
        {},
    ),
    "structured_data/imbalanced_classification": (
        {"creditcard.csv": table(800, *[normal] * 30, one_of(*[0] * 9, 1), header=",".join(["V"] * 31))},
        {"/Users/fchollet/Downloads/": "", "batch_size=2048": "batch_size=64"},
    ),
    "structured_data/deep_neural_decision_forests": (
        {f"adult.{part}": table(800, *ADULT, one_of(" <=50K", " >50K")) for part in ("data", "test")},
        {"num_trees = 25": "num_trees = 5"},
    ),
    "audio/ctc_asr": (
        {
            "LJSpeech-1.1/wavs/w#.wav": sound,
            "LJSpeech-1.1/metadata.csv": table(12, lambda k: f"w{k:02}", *[one_of("is it")] * 2, separator="|"),
        },
        {"rnn_units=512": "rnn_units=32", "batch_size = 32": "batch_size = 4", "rnn_layers=5": "rnn_layers=2"},
    ),
    "audio/speaker_recognition_using_cnn": (
        {f"Downloads/16000_pcm_speeches/{name}/#.wav": sound for name in ("audio/ann", "audio/bob", "noise/other")},
        {"BATCH_SIZE = 128": "BATCH_SIZE = 8"},
    ),
    "nlp/addition_rnn": ({}, {"TRAINING_SIZE = 50000": "TRAINING_SIZE = 400", "epochs = 30": "epochs = 2"}),
    "nlp/lstm_seq2seq": (
        {"fra.txt": table(300, one_of("Go on.", "Run to me!"), one_of("Va !", "Cours !"), whole(), separator="\t")},
        {},
    ),
    "graph/gnn_citations": (
        {
            "cora/cora.cites": table(1600, *[whole(0, 300)] * 2, separator="\t"),
            "cora/cora.content": table(
                300, lambda row: row, *[whole()] * 1433, one_of("Theory", "Neural", "Rule"), separator="\t"
            ),
        },
        {"batch_size = 256": "batch_size = 32"},
    ),
}


# --- one run of one script, in a process of its own ------------------------------------------------------------------


class FakeModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stand-ins for packages that only show things, or read files that are made up here."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        return importlib.util.spec_from_loader(name, self) if name.partition(".")[0] in FAKE else None

    def create_module(self, spec: Any) -> Any:
        fake = mock.MagicMock(__path__=[], __spec__=spec, __name__=spec.name)
        fake.load.return_value.sample = lambda count: RNG.normal(size=(count, 3))  # trimesh
        fake.load.return_value.get_fdata = lambda: RNG.normal(size=(64, 64, 40))  # nibabel
        return fake

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def local(name: Any) -> Any:
    """The file here that stands for an address of the internet."""
    return name.rpartition("/")[2] if isinstance(name, str) and name.startswith("http") else name


def replace_data() -> None:
    def load_data(*shape: int, **_: object) -> Any:
        digits = [RNG.permutation(np.arange(count) % 10).astype(np.uint8) for count in (800, 400)]
        labels = [one[:, None] if len(shape) == 3 else one for one in digits]
        return tuple((RNG.integers(0, 256, (len(one), *shape), dtype=np.uint8), one) for one in labels)

    for name, shape in {"mnist": (28, 28), "fashion_mnist": (28, 28), "cifar10": (32, 32, 3)}.items():
        getattr(keras.datasets, name).load_data = lambda shape=shape, **_: load_data(*shape)
    keras.utils.get_file = lambda fname=None, origin="", **_: str(Path(fname or origin.rpartition("/")[2]).absolute())
    keras.utils.plot_model = lambda *_, **__: None
    for name, make in inspect.getmembers(keras.applications, inspect.isfunction):
        setattr(keras.applications, name, lambda *a, make=make, **more: make(*a, **{**more, "weights": None}))
    os.system = lambda command: 0  # type: ignore[assignment]
    loadtxt = np.loadtxt
    np.loadtxt = lambda name, *a, **more: loadtxt(local(name), *a, **more)  # type: ignore[assignment]
    with contextlib.suppress(ImportError):
        import pandas as pd

        read_csv = pd.read_csv
        pd.read_csv = lambda name, *a, **more: read_csv(local(name), *a, **more)
    import scipy.io

    scipy.io.loadmat = lambda _: {
        "file_list": [[[str(path.relative_to(path.parents[1]))]] for path in sorted(Path().glob("*/Images/*/*"))]
    }


def short(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a `fit`, for few batches of few epochs."""

    def few(values: Any, count: int) -> Any:
        return tf.nest.map_structure(lambda part: part[:count] if hasattr(part, "__getitem__") else part, values)

    x, size = arguments.get("x"), arguments.get("batch_size") or 32
    if isinstance(x, tf.data.Dataset):
        arguments["x"] = x.take(BATCHES)
    elif not isinstance(x, keras.utils.PyDataset):
        count = int(BATCHES * size / (1 - (arguments.get("validation_split") or 0)))
        given = ("x", "y", "sample_weight")
        arguments.update({name: few(arguments[name], count) for name in given if arguments.get(name) is not None})
    validation = arguments.get("validation_data")
    if isinstance(validation, tf.data.Dataset):
        arguments["validation_data"] = validation.take(1)
    elif isinstance(validation, (tuple, list)):
        arguments["validation_data"] = few(validation, size)
    start = arguments.get("initial_epoch") or 0
    return {**arguments, "epochs": min(arguments.get("epochs", 1), start + EPOCHS), "verbose": 0}


def run_script(path: Path, mode: str, place: str, cache: str) -> dict[str, Any]:
    """What the fits of a script did: of each the losses, a digest of the weights, and which tensors moved."""
    os.chdir(place)
    os.environ.update(HOME=place, XDG_CACHE_HOME=cache, MPLBACKEND="agg")
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    measuring.CALIBRATION, measuring.MAX_ROUNDS = measuring.QUICK_CALIBRATION, measuring.MIN_ROUNDS
    profiling.MAX_TRACED = profiling.MIN_TRACED
    files, edits = SCRIPTS[f"{path.parent.name}/{path.stem}"]
    for name, make in files.items():
        for number in range(COUNT if "#" in name else 1):
            file = Path(name.replace("#", f"{number:02}"))
            file.parent.mkdir(parents=True, exist_ok=True)
            make(str(file))
    sys.meta_path.append(FakeModules())
    replace_data()
    keras.utils.set_random_seed(0)
    fit, compile_, signature = keras.Model.fit, keras.Model.compile, inspect.signature(keras.Model.fit)
    fits: list[dict[str, Any]] = []

    def compile_frozen(model: keras.Model, *args: Any, **more: Any) -> None:
        freeze_batch_norm(model)
        compile_(model, *args, **more)

    def recorded_fit(model: keras.Model, *args: Any, **more: Any) -> Any:
        arguments = short(dict(signature.bind(model, *args, **more).arguments))
        arguments.pop("self")
        if not model.built:  # else Keras makes the variables in the first step
            x = arguments["x"]
            model(
                next(iter(x))[0] if isinstance(x, tf.data.Dataset) else tf.nest.map_structure(lambda part: part[:2], x)
            )
        freeze_batch_norm(model)
        fits.append(record := {"model": model.name, "lines": []})

        def start(_: object) -> None:
            record["before"] = [one.numpy() for one in model.trainable_variables]

        recorder = keras.callbacks.LambdaCallback(on_train_begin=start)
        callbacks = [recorder, *(arguments.pop("callbacks", None) or [])]
        said, history = io.StringIO(), None
        if mode != "plain":
            elastic = ElasticTraining(float(mode), interval=1)
            try:
                with contextlib.redirect_stdout(said):
                    history = fit(model, **arguments, callbacks=[*callbacks, elastic])
                record["trained"] = np.any([one.mask for one in elastic.history.selections], axis=0).tolist()
            except UserError as error:
                if history is None:
                    record["refused"] = str(error)
            except Exception as error:
                record["error"] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            record["lines"] = [line for line in said.getvalue().splitlines() if line.startswith("ElasticTraining: ")]
        if history is None:
            history = fit(model, **arguments, callbacks=callbacks)
        after = [one.numpy() for one in model.trainable_variables]
        before = record.pop("before")
        record["moved"] = [not np.array_equal(*pair) for pair in zip(before, after, strict=True)]
        record["losses"] = history.history["loss"]
        record["weights"] = hashlib.sha256(b"".join(one.tobytes() for one in after)).hexdigest()
        return history

    keras.Model.fit, keras.Model.compile = recorded_fit, compile_frozen
    program, error = path.read_text(encoding="utf-8"), None
    for old, new in edits.items():
        program = program.replace(old, new)
    try:
        exec(compile(program, str(path), "exec"), {"__name__": "__main__"})
    except Exception as problem:
        error = f"{type(problem).__name__}: {str(problem).strip().partition(chr(10))[0]}"
    return {"fits": [one for one in fits if "losses" in one], "error": error}


# --- all scripts -----------------------------------------------------------------------------------------------------


def in_process(path: Path, mode: str, cache: str, seconds: int) -> dict[str, Any]:
    """`run_script` in a copy of this process, which has imported TensorFlow and made nothing with it."""
    with tempfile.TemporaryDirectory() as place, multiprocessing.get_context("fork").Pool(1) as pool:
        try:
            return pool.apply_async(run_script, (path, mode, place, cache)).get(seconds)
        except multiprocessing.TimeoutError:
            return {"fits": [], "error": f"longer than {seconds} s"}


def verdict(plain: dict[str, Any], one: dict[str, Any]) -> str:
    """What ElasticTraining did in a fit, whose plain run is `plain`."""
    if "refused" in one or "error" in one:
        return f"refused: {one['refused']}" if "refused" in one else f"error: {one['error']}"
    if "trained" not in one:
        return "left alone"
    astray = [k for k, (moved, trained) in enumerate(zip(one["moved"], one["trained"], strict=True)) if moved > trained]
    if astray:
        return f"moved, but not selected: {astray}"
    if all(one["trained"]) or one["moved"] == plain["moved"]:
        if one["losses"] == plain["losses"] and one["weights"] == plain["weights"]:
            return "equal"
        away = np.max(np.abs(np.subtract(one["losses"], plain["losses"])) / np.abs(plain["losses"]))
        return "equal losses" if away == 0 else f"losses differ by {away:.0e}"
    return f"{sum(one['moved'])} of {sum(plain['moved'])} moved"


def main() -> None:
    parser = OneLineParser(prog="try_examples.py", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder examples of a checkout of keras-io")
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="scripts whose path contains one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes the results there, too")
    parser.add_argument("--seconds", type=whole_number(1, 3600), default=60, help="of a run; default: %(default)s")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    print("| script | fit | tensors | ρ = 1 | ρ = 0.5 |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as cache:
        for name in SCRIPTS:
            path = (args.folder / f"{name}.py").resolve()
            if not path.exists() or not any(word in name for word in args.only):
                continue
            runs = results[name] = {mode: in_process(path, mode, cache, args.seconds) for mode in MODES}
            plain, *elastic = runs.values()
            pairs = zip(plain["fits"], elastic[0]["fits"], strict=False)
            if any("trained" in one and verdict(first, one) != "equal" for first, one in pairs):
                again = runs["plain again"] = in_process(path, "plain", cache, args.seconds)
                if again["fits"] != plain["fits"]:
                    elastic[0]["note"] = "; so do two plain fits"
            for k, first in enumerate(plain["fits"]):
                cells = [verdict(first, run["fits"][k]) if k < len(run["fits"]) else run["error"] for run in elastic]
                cells[0] += elastic[0].get("note", "") * (cells[0] != "equal")
                print(f"| {name} | {first['model']} | {len(first['moved'])} | {' | '.join(cells)} |", flush=True)
            if plain["error"]:
                print(f"| {name} | | | ends without it, too: {plain['error']} | |", flush=True)
    if not results:
        raise UserError(f"{args.folder}: none of the scripts is there; it has folders such as vision")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    utils.run_cli(main)
