#!/usr/bin/env python
"""The paper's experiment at its own settings, on photos: the runs and figures of docs/paper_results.md.

Each part is one call of run_figure.py with the paper's settings: 224 px, batches of 4, 12 epochs, SGD at 1e-4, a
selection every 3 epochs. Networks and photos are others: MobileNetV2 (width 0.35) and EfficientNet-Lite0, three data
sets of study_data.py. Runs go one after the other, each alone on the machine. Start it again after a stop: complete
runs are kept, interrupted ones continue. What runs recorded is kept in docs/results/paper/runs.tar.xz, so that another
checkout continues, too.

    python scripts/study/paper_on_photos.py --data_root DIR --weights_file FILE
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "figures"))

import plotting  # noqa: F401 (first: it sets the import path)
from plotting import ROOT
from study_data import INPUT_SIZES, split_folder

import utils
from elastic_trainer.runs.reader import CONFIG, METRICS, SELECTIONS, SUMMARY, is_finished
from elastic_trainer.settings.flags import OneLineParser, existing_file, folder
from elastic_trainer.system.errors import UserError
from elastic_trainer.system.files import atomic_path

RESULTS = ROOT / "docs/results/paper"
RECORDED = (CONFIG, SUMMARY, METRICS, SELECTIONS)  # of each finished run
MOBILENET, EFFICIENTNET = "mobilenetv2", "efficientnetlite0"
# Of 1e-4, 3e-4, 1e-3, 3e-3 and 1e-2, full training of MobileNetV2 survives the first alone, the paper's.
COLLAPSING_RATE = 3e-4


class Part(NamedTuple):
    """A figure of one network on one data set."""

    figure: str
    data: str
    model: str = MOBILENET
    seeds: int = 1
    rate: float | None = None  # None: the paper's

    @property
    def place(self) -> str:
        """The folder of its runs, of one setting; figures are named after it."""
        return self.data if self.rate is None else f"{self.data}_rate{self.rate:g}"

    @property
    def name(self) -> str:
        return f"figure{self.figure}_{self.place}_{self.model}".replace("figuretable", "table")


CURVES = "15ad"
PARTS = (
    *(Part(CURVES, data, seeds=3) for data in INPUT_SIZES),
    *(Part(figure, "grocery") for figure in ("17ac", "17bd", "18", "21", "22", "23")),
    *(Part("20", data) for data in ("grocery", "sign_digits")),
    *(Part(figure, "grocery") for figure in ("7", "13", "table1")),
    *(Part(CURVES, data, rate=COLLAPSING_RATE) for data in INPUT_SIZES),
    *(Part("table2", data, seeds=3) for data in INPUT_SIZES),
    *(Part(CURVES, data, EFFICIENTNET) for data in ("dogs", "sign_digits", "grocery")),
    Part("table1", "grocery", EFFICIENTNET),
)


def words_of(part: Part, args: argparse.Namespace) -> list[str]:
    """The call of run_figure.py that makes a part."""
    network = ["--weights", "imagenet"]
    if part.model == MOBILENET:
        network = ["--alpha", "0.35", "--weights", str(args.weights_file)]
    return [
        *(str(ROOT / "scripts/figures/run_figure.py"), part.figure, "--dataset_name", "image_folder"),
        *("--data_dir", str(args.logdir / "data" / part.data), "--model_name", part.model, *network),
        *("--seeds", str(part.seeds), "--logdir", str(args.logdir / part.place), "--output", str(RESULTS / part.name)),
        *(() if part.rate is None else ("--", "--learning_rate", f"{part.rate:g}")),
    ]


def draw_together(logdir: Path, model: str) -> None:
    """Figure 15: the curves of all data sets in one picture."""
    schemes = ("elastic_training_rho50", "full_training", "traditional_tl_training", "bn_plus_bias_training")
    runs = [
        run
        for data in INPUT_SIZES
        for scheme in schemes
        for run in sorted((logdir / data).glob(f"{model}_image_folder_{scheme}_seed*/"))
        if is_finished(run)
    ]
    stem = RESULTS / f"figure15_{model}"
    subprocess.run([sys.executable, ROOT / "scripts/figures/plot.py", "curves", *runs, "--output", stem], check=True)
    stem.with_suffix(".pdf").unlink()


def pack(logdir: Path) -> None:
    """Write what the finished runs recorded into one archive."""
    runs = sorted(path.parent for path in logdir.glob(f"*/*/{CONFIG}") if is_finished(path.parent))
    profiles = sorted(logdir.glob("*/profiles/*/profile.json"))
    files = [run / name for run in runs for name in RECORDED if (run / name).is_file()]
    files += [path.with_name(name) for path in profiles for name in ("profile.json", "table.csv")]
    RESULTS.mkdir(parents=True, exist_ok=True)
    with atomic_path(RESULTS / "runs.tar.xz") as path, tarfile.open(path, "w:xz") as archive:
        for file in files:
            archive.add(file, str(file.relative_to(logdir)), filter=_nobodys)


def _nobodys(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


def unpack(logdir: Path) -> None:
    """Put runs from the archive where there are none."""
    if (RESULTS / "runs.tar.xz").is_file():
        with tarfile.open(RESULTS / "runs.tar.xz") as archive:
            there = {path.relative_to(logdir).as_posix() for path in logdir.glob("*/*")}
            there |= {path.relative_to(logdir).as_posix() for path in logdir.glob("*/profiles/*")}
            missing = [member for member in archive if str(Path(member.name).parent) not in there]
            archive.extractall(logdir, missing, filter="data")


def link_photos(args: argparse.Namespace) -> None:
    """Make the folders of photos, `<logdir>/data/<name>`, to train and to test on."""
    for name in INPUT_SIZES:
        place = args.logdir / "data" / name
        if not place.is_dir():
            split_folder(args.data_root, name, args.logdir / "data").rename(place)


def main() -> None:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data_root", type=folder, required=True, metavar="DIR", help="holds the data sets' folders")
    add("--weights_file", type=existing_file, required=True, metavar="FILE", help="MobileNetV2 0.35, no top")
    add("--logdir", type=Path, default=Path("logs/paper"), metavar="DIR", help="default: %(default)s")
    add("--only", default="*", metavar="PATTERN", help="parts whose name fits, such as 'figure15ad_dogs_*'")
    args = parser.parse_args()
    args.logdir.mkdir(parents=True, exist_ok=True)
    link_photos(args)
    unpack(args.logdir)
    for part in PARTS:
        if not fnmatch(part.name, args.only):
            continue
        print(f"{part.name}: {part.seeds} of each run", flush=True)
        words = words_of(part, args)
        if subprocess.run([sys.executable, *words], check=False).returncode:
            raise UserError(f"{part.name} was not finished; start this script again to continue")
        (RESULTS / f"{part.name}.pdf").unlink(missing_ok=True)
        pack(args.logdir)
        if part.figure == CURVES and part.rate is None:
            draw_together(args.logdir, part.model)


if __name__ == "__main__":
    utils.run_cli(main)
