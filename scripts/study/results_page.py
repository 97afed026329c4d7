#!/usr/bin/env python
"""Bring the tables of README.md, docs/results.md and docs/log/, and the pictures, up to date with docs/results/.

Each table stands between `<!-- KIND NAME -->` and `<!-- end -->`; KIND is one of `TABLES`, NAME that of a CSV file of
run_study.py.

    python scripts/study/results_page.py
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "figures"))

import plotting  # first: it sets the import path
from common import ROOT

import utils
from elastic_trainer.cli.parser import OneLineParser
from elastic_trainer.files import reading, save_figure, write_text
from elastic_trainer.runs import reader

RESULTS = ROOT / "docs" / "results"
PAGES = [ROOT / "README.md", ROOT / "docs" / "results.md", *sorted((ROOT / "docs" / "log").glob("*.md"))]
BLOCK = re.compile(r"<!-- (?P<kind>\w+) (?P<name>\w+) -->\n.*?<!-- end -->", re.DOTALL)
TRAIN_TYPES = {  # by the first word of a setting
    "full": "full_training",
    "elastic": "elastic_training",
    "upper": "elastic_training_upper_part",
    "random": "elastic_training_random",
    "head": "traditional_tl_training",
}
REFERENCE = ("full, batch 4", 1.0)  # what times are shares of
SHOWN = (  # setting and share of the time, in the table of all data sets
    ("head in closed form", 0.0),
    ("upper 0.5, batch 32", 1 / 8),
    ("upper 0.5, batch 32", 1 / 3),
    ("upper 0.5, batch 32", 1 / 2),
    ("full, batch 32", 1.0),
    REFERENCE,
)
MARKERS = "os^D*v"  # of settings in their order; no more can be told from each other
MEASURED = ("final_accuracy", "train_seconds", "elapsed_seconds")
WORDS = {
    "full": "full training",
    "elastic": "ElasticTrainer, by importance",
    "upper": "ElasticTrainer, upper part",
    "random": "random tensors",
    "head": "new head alone",
    "deadline": "`main.py --deadline`",
}
TITLES = {
    "grocery": "Photos from shops (Grocery Store Dataset, 81 classes), MobileNetV2 0.35, 160×160",
    "dogs": "Photos of dogs (Imagewoof, 6 breeds), MobileNetV2 0.35, 160×160",
    "sign_digits": "Photos of hands (Sign Language Digits, 10 classes, other persons), MobileNetV2 0.35, 96×96",
}


class Point(NamedTuple):
    """Runs that differ in their seed alone.

    Attributes:
        accuracies: after the last epoch, 0…1.
        seconds: of training.
        elapsed_seconds: of the whole run; not a number where earlier versions did not record it.
    """

    setting: str
    budget: float
    rate: float
    accuracies: np.ndarray
    seconds: np.ndarray
    elapsed_seconds: np.ndarray


def scheme_of(setting: str) -> str:
    """The scheme of a setting: its first word."""
    return setting.replace(",", " ").split()[0]


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file. Raises `UserError` if it cannot be read."""
    with reading(path):
        return reader.read_rows(path)


def points_of(rows: Sequence[dict[str, str]]) -> list[Point]:
    """The points of the rows of a CSV file of run_study.py, in their order."""
    found: dict[tuple[str, float, float], list[list[float]]] = {}
    for row in rows:
        key = row["setting"], float(row["budget"]), float(row["learning_rate"])
        found.setdefault(key, []).append([float(row.get(name) or "nan") for name in MEASURED])
    return [Point(*key, *np.array(values).T) for key, values in found.items()]


def spread(values: np.ndarray, digits: int = 1) -> str:
    """Mean ± standard deviation; the mean alone of one value."""
    mean = f"{values.mean():.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {values.std(ddof=1):.{digits}f}"


def table(path: Path) -> str:
    """A row a setting; columns are budgets, or learning rates if these differ at one budget."""
    points = points_of(read_rows(path))
    by_rate = len({(point.setting, point.budget) for point in points}) < len(points)
    columns = sorted({point.rate if by_rate else point.budget for point in points})
    heads = [f"rate {value:g}" if by_rate else f"{_share(value)} of the time" for value in columns]
    rows = []
    for setting in dict.fromkeys(point.setting for point in points):
        cells = []
        for column in columns:
            here = [p for p in points if p.setting == setting and (p.rate if by_rate else p.budget) == column]
            cells.append(f"{spread(100 * here[0].accuracies)} % ({spread(here[0].seconds, 0)} s)" if here else "")
        rows.append([setting, *cells])
    return _lines(["setting", *heads], rows)


def shares_table(path: Path) -> str:
    """The settings of `SHOWN`, a column for each file of the study's part `path`, whose names go on with a data set."""
    return _by_data(SHOWN, {data: points_at(one) for data, one in _files(path).items()})


def waited_table(path: Path) -> str:
    """The deadlines of the part `path` and full training, as `shares_table`, with the wall time of the whole run."""
    found = {}
    for data, one in _files(path).items():
        points = points_at(one) | {REFERENCE: points_at(path.with_name(f"equal_time_{data}.csv"))[REFERENCE]}
        found[data] = {key: point._replace(seconds=point.elapsed_seconds) for key, point in points.items()}
    return _by_data([*dict.fromkeys(key for points in found.values() for key in points)], found)


def _files(path: Path) -> dict[str, Path]:
    """The files of a part of the study, by data set."""
    return {one.stem.removeprefix(f"{path.stem}_"): one for one in sorted(path.parent.glob(f"{path.stem}_*.csv"))}


def points_at(path: Path) -> dict[tuple[str, float], Point]:
    """The points of a file, by setting and budget."""
    return {(point.setting, point.budget): point for point in points_of(read_rows(path))}


def _by_data(shown: Sequence[tuple[str, float]], found: dict[str, dict[tuple[str, float], Point]]) -> str:
    """A row for each setting and planned share of `shown`, a column a data set: accuracy, time, and measured share."""

    def cell(point: Point | None, full: Point) -> str:
        if point is None:
            return ""
        seconds = point.seconds.mean()
        return f"{spread(100 * point.accuracies)} % ({seconds:.0f} s, {seconds / full.seconds.mean():.2f})"

    rows = []
    for setting, share in shown:
        cells = [cell(points.get((setting, share)), points[REFERENCE]) for points in found.values()]
        rows.append([_in_words(setting), _share(share), *cells])
    return _lines(["scheme", "planned share", *(name.replace("_", " ") for name in found)], rows)


def memory_table(path: Path) -> str:
    """A row a setting: accuracy, and the memory that training took beyond what the process had before it."""
    rows = [
        [_in_words(setting), f"{spread(100 * accuracies)} %", *(f"{mb.mean():.0f} MB" for mb in (grown_mb, peak_mb))]
        for setting, (accuracies, grown_mb, peak_mb) in _memory_of(path).items()
    ]
    return _lines(["scheme", "test accuracy", "memory of training", "peak of the process"], rows)


def _memory_of(path: Path) -> dict[str, np.ndarray]:
    """For each setting [3, runs]: accuracy, MB that training took, and the peak of the process in MB."""
    columns = _columns(path, ["final_accuracy", "peak_memory_mb", "start_memory_mb"])
    return {
        setting: np.stack([accuracies, peak_mb - start_mb, peak_mb])
        for setting, (accuracies, peak_mb, start_mb) in columns.items()
    }


def draw_memory(path: Path, title: str) -> None:
    """Accuracy over the memory that training took: a small dot a run, a marker the mean, a line each scheme."""
    figure = plotting.new_figure(7, 4, title)
    axes = figure.add_subplot(xlabel="memory of training (MB)", ylabel="test accuracy (%)")
    of_scheme: dict[str, list[np.ndarray]] = {}
    for setting, (accuracies, grown_mb, _) in _memory_of(path).items():
        of_scheme.setdefault(scheme_of(setting), []).append(np.array([grown_mb, 100 * accuracies]))
    for scheme, points in of_scheme.items():
        look = plotting.LOOKS[TRAIN_TYPES[scheme]]
        means = np.array(sorted(point.mean(axis=1).tolist() for point in points)).T
        axes.plot(*means, look.marker, ls=look.dashes, color=look.colour, ms=6, label=WORDS[scheme])
        for point in points:
            axes.plot(*point, ".", color=look.colour, ms=4, alpha=0.5)
    axes.set_xlim(left=0)
    figure.legend(loc="outside right center", fontsize="small")
    save_figure(figure, path.with_suffix(""))


def rows_table(path: Path) -> str:
    """Accuracy and time of recurrent and attention networks."""
    return _by_setting(path, {"final_accuracy": "test accuracy"})


def _by_setting(path: Path, accuracies: dict[str, str]) -> str:
    """A row a setting: mean and spread of the columns `accuracies`, whose values are heads, and of training time."""
    rows = [
        [name, *(f"{spread(100 * one)} %" for one in columns), f"{spread(seconds, 0)} s"]
        for name, (*columns, seconds) in _columns(path, [*accuracies, "train_seconds"]).items()
    ]
    return _lines(["setting", *accuracies.values(), "training time"], rows)


def _columns(path: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """For each setting its values [names, runs]."""
    found: dict[str, list[list[float]]] = {}
    for row in read_rows(path):
        found.setdefault(row["setting"], []).append([float(row[name]) for name in names])
    return {setting: np.array(values).T for setting, values in found.items()}


def _in_words(setting: str) -> str:
    """A setting for readers who do not know its name: "elastic 0.4, no cache" has a rho and a remark."""
    scheme = scheme_of(setting)
    rho, _, remark = setting.removeprefix(scheme).strip(", ").partition(", ")
    is_rho = rho[:1].isdigit()
    parts = [WORDS.get(scheme, scheme), f"ρ = {rho}" if is_rho else rho, remark]
    return ", ".join(part for part in parts if part)


def _share(share: float) -> str:
    """A share of full training's time."""
    return f"1/{1 / share:g}" if 0 < share < 1 else f"{share:g}"


def _lines(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, *rows)]
    return "\n".join([lines[0], "|---" * len(heads) + "|", *lines[1:]])


TABLES = {
    "all": table,
    "shares": shares_table,
    "waited": waited_table,
    "rows": rows_table,
    "memory": memory_table,
}


def draw(points: Sequence[Point], stem: Path, title: str) -> None:
    """Accuracy over measured training time: a small dot a run, a marker the mean, a line the budgets of a setting.

    An empty marker tells a setting from an earlier one of its scheme, which may be in the same place.
    """
    figure = plotting.new_figure(7, 4, title)
    axes = figure.add_subplot(xlabel="training time (s)", ylabel="test accuracy (%)")
    seen: set[str] = set()
    settings = [*dict.fromkeys(point.setting for point in points)]
    for setting, marker in zip(settings, cycle(MARKERS), strict=False):
        scheme = TRAIN_TYPES[scheme_of(setting)]
        look, face = plotting.LOOKS[scheme], "none" if scheme in seen else None
        seen.add(scheme)
        here = sorted((p for p in points if p.setting == setting), key=lambda p: p.budget)
        seconds, percent = [p.seconds.mean() for p in here], [100 * p.accuracies.mean() for p in here]
        axes.plot(seconds, percent, marker, ls=look.dashes, color=look.colour, mfc=face, ms=6, label=_in_words(setting))
        for point in here:
            axes.plot(point.seconds, 100 * point.accuracies, ".", color=look.colour, ms=4, alpha=0.5)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.xaxis.set_minor_formatter(lambda x, _: f"{x:.0f}" if f"{x:.0f}"[0] in "2357" else "")  # others overlap
    figure.legend(loc="outside right center", fontsize="small")
    save_figure(figure, stem)


def updated(page: str) -> str:
    """The page with the tables of the present files."""

    def block(match: re.Match[str]) -> str:
        kind, name = match["kind"], match["name"]
        return f"<!-- {kind} {name} -->\n{TABLES[kind](RESULTS / f'{name}.csv')}\n<!-- end -->"

    return BLOCK.sub(block, page)


def main() -> None:
    OneLineParser(prog="results_page.py", description=__doc__).parse_args()
    for page in PAGES:
        write_text(page, updated(page.read_text(encoding="utf-8")))
    for path in sorted(RESULTS.glob("equal_time_*.csv")):
        draw(points_of(read_rows(path)), path.with_suffix(""), TITLES[path.stem.removeprefix("equal_time_")])
    for path in sorted(RESULTS.glob("memory_*.csv")):
        draw_memory(path, TITLES[path.stem.removeprefix("memory_")])


if __name__ == "__main__":
    utils.run_cli(main)
