#!/usr/bin/env python
"""What people would use instead, on the same photos: accuracy by wall time of everything.

Ours is `main.py --deadline TIME`, each time without a timing table, as a first run has it: with the network that it
takes when none is named and both are here, and with MobileNetV2. The others are the methods of others.py, each with
both networks. Each run has one core, as many side by side as there are cores. A row a run is written to docs/results/;
runs that have one are not repeated. PyTorch's need `pip install torch torchvision efficientnet-lite-pytorch`.

    python scripts/study/compare_others.py --data grocery --data_root DIR --weights_file FILE --seeds 3
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "figures"))

import numpy as np
from others import METHODS, keras_network
from plotting import ROOT
from study_data import INPUT_SIZES, split_folder

import utils
from elastic_trainer.runs.reader import read_rows, read_summary
from elastic_trainer.settings.flags import OneLineParser, count, existing_file, folder, one_of
from elastic_trainer.system.errors import UserError
from elastic_trainer.system.files import write_csv
from elastic_trainer.system.machine import environment, load_tensorflow

OURS, CHOSEN = "main.py --deadline", "chosen"
ONCE = ("logistic_regression", "lda")  # which end by themselves
WITH_TIME = (OURS, "keras_guide")  # a run for each time; else for the longest
ALPHA = 0.35
COLUMNS = ("method", "network", "data", "seconds", "seed", "curve", "commit")
COMPARED_SECONDS, LATE_SECONDS = (30, 60, 120, 300, 600), 2.0  # the others' last steps may end a little later
NETWORKS = {"mobilenetv2": "MobileNetV2 0.35", "efficientnetlite0": "EfficientNet-Lite0", CHOSEN: "as it chooses"}
METHODS_IN_WORDS = {
    "main.py --deadline": "**`main.py --deadline`**",
    "pytorch_full": "PyTorch's tutorial, all layers",
    "pytorch_head": "PyTorch's tutorial, the head",
    "keras_guide": "Keras' guide",
    "logistic_regression": "scikit-learn, logistic regression",
    "lda": "scikit-learn, linear discriminant analysis",
}
ONE_THREAD = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}


class Compared(NamedTuple):
    """A run of a method with a network on a data set, for so many seconds."""

    method: str
    network: str
    data: str
    seconds: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.method.split('.')[0]}_{self.network}_{self.data}_{self.seconds}s_s{self.seed}"

    @property
    def input_size(self) -> int:
        """In pixels. Below 128, EfficientNet-Lite0 sees little."""
        return INPUT_SIZES[self.data] if self.network == "mobilenetv2" else max(INPUT_SIZES[self.data], 128)

    @property
    def key(self) -> tuple[str, ...]:
        return tuple(map(str, self))


def runs_of(data: str, seeds: int) -> Iterator[Compared]:
    """All runs on a data set, those of the first seed first."""
    for seed in range(seeds):
        for method in (OURS, *METHODS):
            for seconds in COMPARED_SECONDS if method in WITH_TIME else COMPARED_SECONDS[-1:]:
                for network in ("mobilenetv2", CHOSEN if method == OURS else "efficientnetlite0"):
                    yield Compared(method, network, data, seconds, seed)


def write_arrays(path: Path, weights: Path, size: int) -> None:
    """The weights of Keras' network in the order and layout of torchvision's, and what it returns for one batch."""
    load_tensorflow()
    import keras

    network = keras_network("mobilenetv2", weights, ALPHA, size)
    arrays: dict[str, np.ndarray] = {}
    places = [
        layer
        for layer in network.layers
        if "conv" in type(layer).__name__.lower() or "batch" in type(layer).__name__.lower()
    ]
    for index, layer in enumerate(places):
        values = layer.get_weights()
        if len(values) == 1:
            axes = (2, 3, 0, 1) if isinstance(layer, keras.layers.DepthwiseConv2D) else (3, 2, 0, 1)
            arrays[f"{index}.weight"] = values[0].transpose(axes)
        else:
            names = ("weight", "bias", "running_mean", "running_var")
            arrays |= {f"{index}.{name}": value for name, value in zip(names, values, strict=True)}
    images = np.random.default_rng(0).uniform(-1, 1, (4, size, size, 3)).astype(np.float32)
    features = np.asarray(network(images, training=False))
    np.savez(path, inputs=images.transpose(0, 3, 1, 2), features=features, **arrays)  # type: ignore[arg-type]


def put_into_keras_home(weights: Path, home: Path) -> None:
    """MobileNetV2's weights where Keras looks for them, for every size: the same ones, as all methods have them."""
    from elastic_trainer.networks.candidates import SIZES, weights_file

    (home / "models").mkdir(parents=True, exist_ok=True)
    for size in SIZES:
        shutil.copyfile(weights, home / "models" / weights_file(size))


def carry_out(run: Compared, args: Namespace, arrays: Path, core: int) -> str:
    """Carry out a run on a core: its curve, "seconds:accuracy …". Raises `UserError` if it fails."""
    photos = split_folder(args.data_root, run.data, args.logdir / "data")
    shared, network = ["--data_dir", photos, "--seed", run.seed], ["--input_size", run.input_size, "--alpha", ALPHA]
    logdir = args.logdir / "others" / run.name
    if run.method == OURS:
        shutil.rmtree(logdir, ignore_errors=True)  # a first run has no timing table
        network += ["--model_name", run.network, "--weights", args.weights_file]
        words = [ROOT / "main.py", "--dataset_name", "image_folder", *shared, "--deadline", run.seconds]
        words += ["--logdir", logdir, "--run_name", "run", *([] if run.network == CHOSEN else network)]
    else:
        network += ["--network", run.network, "--weights", args.weights_file, "--arrays", arrays]
        words = [ROOT / "scripts/study/others.py", run.method, *shared, *network, "--seconds", run.seconds]
    command = ["taskset", "--cpu-list", core, sys.executable, *words]
    one_thread = {**os.environ, **ONE_THREAD, "OMP_NUM_THREADS": "1", "KERAS_HOME": str(args.logdir / "keras")}
    done = subprocess.run([*map(str, command)], check=False, env=one_thread, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{run.name}: {done.stderr.strip()[-500:]}")
    if run.method == OURS:
        summary = read_summary(logdir / "run")
        return f"{summary['wall_seconds']:.1f}:{summary['best_accuracy']:.4f}"
    return " ".join(f"{seconds:.1f}:{accuracy:.4f}" for seconds, accuracy in json.loads(done.stdout.splitlines()[-1]))


def others_table(results: Path) -> str:
    """Markdown: a row for each method and network, a column for each data set: accuracies after each of
    `COMPARED_SECONDS`."""
    files = {one.stem.removeprefix("others_"): one for one in sorted(results.glob("others_*.csv"))}
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for data, path in files.items():
        runs: dict[tuple[str, str], list[dict[str, str]]] = {}
        for row in read_rows(path):
            runs.setdefault((row["method"], row["network"]), []).append(row)
        for each, rows in runs.items():
            shown = " · ".join(_accuracy_after(rows, seconds) for seconds in COMPARED_SECONDS)
            cells.setdefault(each, {})[data] = shown
    heads = ["after 30 s · 1 · 2 · 5 · 10 minutes", "network", *(f"{name.replace('_', ' ')} (%)" for name in files)]
    lines = [heads, ["---"] * len(heads)]
    for method, network in [(method, network) for network in NETWORKS for method in METHODS_IN_WORDS]:
        found = cells.get((method, network), {})
        lines += (
            [[METHODS_IN_WORDS[method], NETWORKS[network], *(found.get(data, "–") for data in files)]] if found else []
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _accuracy_after(rows: Sequence[Mapping[str, str]], seconds: int) -> str:
    """Mean over seeds of the best accuracy so far in percent, by the longest runs or by those of this length."""
    lengths, found = {int(row["seconds"]) for row in rows}, dict[str, list[float]]()
    wanted = seconds if seconds in lengths else max(lengths)
    if wanted < seconds and rows[0]["method"] not in ONCE:
        return "–"  # not run for so long
    for row in (row for row in rows if int(row["seconds"]) == wanted):
        for point in row["curve"].split():
            at, accuracy = map(float, point.split(":"))
            if at <= seconds + LATE_SECONDS:
                found.setdefault(row["seed"], []).append(100 * accuracy)
    return f"{np.mean([max(values) for values in found.values()]):.1f}" if found else "–"


def parse() -> Namespace:
    """The command line."""
    parser = OneLineParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=one_of([*INPUT_SIZES]), default="grocery", metavar="NAME", help=", ".join(INPUT_SIZES))
    add("--data_root", type=folder, required=True, metavar="DIR", help="holds the data sets' folders")
    add("--weights_file", type=existing_file, required=True, metavar="FILE", help="MobileNetV2 0.35, no top")
    add("--seeds", type=count, default=1, metavar="N", help="default: %(default)s")
    add("--logdir", type=Path, default=Path("logs/study"), metavar="DIR", help="default: %(default)s")
    add("--results", type=Path, default=ROOT / "docs/results", metavar="DIR", help="default: docs/results")
    add("--only", default="*", metavar="PATTERN", help="runs whose name fits, as '*_30s_*'")
    return parser.parse_args()


def main() -> None:
    args = parse()
    path = args.results / f"others_{args.data}.csv"
    columns = COLUMNS[:-2]
    rows: dict[tuple[str, ...], dict[str, Any]] = (
        {tuple(row[name] for name in columns): row for row in read_rows(path)} if path.exists() else {}
    )
    missing = [run for run in runs_of(args.data, args.seeds) if run.key not in rows and fnmatch(run.name, args.only)]
    if not missing:
        print(others_table(args.results))
        return
    arrays = args.logdir / f"torch_{args.data}.npz"
    arrays.parent.mkdir(parents=True, exist_ok=True)
    write_arrays(arrays, args.weights_file, INPUT_SIZES[args.data])
    put_into_keras_home(args.weights_file, args.logdir / "keras")
    split_folder(args.data_root, args.data, args.logdir / "data")
    cores: SimpleQueue[int] = SimpleQueue()
    for core in sorted(os.sched_getaffinity(0)):
        cores.put(core)
    commit = environment()["commit"]

    def one(run: Compared) -> None:
        core = cores.get()
        try:
            curve = carry_out(run, args, arrays, core)
        finally:
            cores.put(core)
        print(run.name, curve.split()[-1], flush=True)
        rows[run.key] = {**dict(zip(columns, run, strict=True)), "curve": curve, "commit": commit}
        write_csv(path, COLUMNS, [[row[name] for name in COLUMNS] for row in list(rows.values())])

    with ThreadPoolExecutor(cores.qsize()) as pool:
        for _ in pool.map(one, missing):
            pass
    print(others_table(args.results))


if __name__ == "__main__":
    utils.run_cli(main)
