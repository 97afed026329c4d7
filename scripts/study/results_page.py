#!/usr/bin/env python
"""Bring the tables of README.md, docs/results.md and docs/log/, and the pictures, up to date with docs/results/.

Each table stands between `<!-- KIND NAME -->` and `<!-- end -->`; KIND is one of `TABLES`, NAME that of a CSV file of
run_study.py.

    python scripts/study/results_page.py
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "figures"))

import plotting  # first: it sets the import path
from plotting import ROOT

import utils
from elastic_trainer.runs import reader
from elastic_trainer.settings.flags import OneLineParser
from elastic_trainer.system.files import reading, save_figure, write_text

RESULTS = ROOT / "docs" / "results"
PAGES = [ROOT / "README.md", ROOT / "docs" / "results.md", *sorted((ROOT / "docs" / "log").glob("*.md"))]
BLOCK = re.compile(r"<!-- (?P<kind>\w+) (?P<name>\w+) -->\n.*?<!-- end -->", re.DOTALL)
FIRST_WORDS = {  # by the first word of a setting: the scheme, and words for it
    "full": ("full_training", "full training"),
    "elastic": ("elastic_training", "ElasticTrainer, by importance"),
    "upper": ("elastic_training_upper_part", "ElasticTrainer, upper part"),
    "random": ("elastic_training_random", "random tensors"),
    "head": ("traditional_tl_training", "new head alone"),
    "deadline": ("elastic_training_upper_part", "`main.py --deadline`"),
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
COMPARED_SECONDS, LATE_SECONDS = (30, 60, 120, 300), 2.0  # the others' last steps may end a little later
METHODS_IN_WORDS = {
    "main.py --deadline": "**`main.py --deadline`**",
    "pytorch_full": "PyTorch's tutorial, all layers",
    "pytorch_head": "the same, the head",
    "keras_guide": "Keras' guide",
    "logistic_regression": "scikit-learn on features, logistic regression",
    "lda": "the same, linear discriminant analysis",
}
MARKERS = "os^D*v"  # of settings in their order; no more can be distinguished
TITLES = {
    "grocery": "Photos from shops (Grocery Store Dataset, 81 classes), MobileNetV2 0.35, 160×160",
    "dogs": "Photos of dogs (Imagewoof, 6 breeds), MobileNetV2 0.35, 160×160",
    "sign_digits": "Photos of hands (Sign Language Digits, 10 classes, other persons), MobileNetV2 0.35, 96×96",
}
MEASURED = ("final_accuracy", "train_seconds", "elapsed_seconds", "peak_memory_mb", "start_memory_mb")


class Point(NamedTuple):
    """Runs that differ in their seed alone; arrays [runs], NaN where a version did not record a value.

    `seconds` are those of training, `grown_mb` the memory that it took; the others are those of the whole run.
    """

    setting: str
    budget: float
    rate: float
    percent: np.ndarray
    seconds: np.ndarray
    elapsed_seconds: np.ndarray
    peak_mb: np.ndarray
    grown_mb: np.ndarray


def scheme_of(setting: str) -> str:
    """The scheme of a setting: its first word."""
    return setting.replace(",", " ").split()[0]


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file. Raises `UserError` if it cannot be read."""
    with reading(path):
        return reader.read_rows(path)


def read_points(path: Path) -> list[Point]:
    """The points of a CSV file of run_study.py in their order: one for each setting, budget and learning rate."""
    found: dict[tuple[str, float, float], list[list[float]]] = {}
    for row in read_rows(path):
        key = row["setting"], float(row["budget"]), float(row["learning_rate"])
        found.setdefault(key, []).append([float(row.get(name) or "nan") for name in MEASURED])
    points = []
    for key, rows in found.items():
        accuracy, seconds, elapsed, peak_mb, start_mb = np.array(rows).T
        points.append(Point(*key, 100 * accuracy, seconds, elapsed, peak_mb, peak_mb - start_mb))
    return points


def points_at(path: Path) -> dict[tuple[str, float], Point]:
    """The points of a file, by setting and budget."""
    return {(point.setting, point.budget): point for point in read_points(path)}


def spread(values: np.ndarray, digits: int = 1) -> str:
    """Mean ± standard deviation; the mean alone of one value."""
    mean = f"{values.mean():.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {values.std(ddof=1):.{digits}f}"


def lines(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    head, *rest = (f"| {' | '.join(cells)} |" for cells in (heads, *rows))
    return "\n".join([head, "|---" * len(heads) + "|", *rest])


def table(path: Path) -> str:
    """A row a setting; columns are budgets, or learning rates if these differ at one budget."""
    points = read_points(path)
    by_rate = len({(point.setting, point.budget) for point in points}) < len(points)
    cells: dict[str, dict[float, str]] = {}
    for point in points:
        column = point.rate if by_rate else point.budget
        cells.setdefault(point.setting, {})[column] = f"{spread(point.percent)} % ({spread(point.seconds, 0)} s)"
    columns = sorted({column for row in cells.values() for column in row})
    heads = [f"rate {value:g}" if by_rate else f"{_share(value)} of the time" for value in columns]
    rows = ([setting, *(row.get(column, "") for column in columns)] for setting, row in cells.items())
    return lines(["setting", *heads], rows)


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


def _by_data(shown: Sequence[tuple[str, float]], found: Mapping[str, Mapping[tuple[str, float], Point]]) -> str:
    """A row for each setting and planned share of `shown`, a column a data set: accuracy, time, and measured share."""
    rows = []
    for setting, share in shown:
        cells = [in_words(setting), _share(share)]
        for points in found.values():
            point = points.get((setting, share))
            seconds, full_seconds = (one.seconds.mean() if one else 0 for one in (point, points.get(REFERENCE)))
            cells.append(f"{spread(point.percent)} % ({seconds:.0f} s, {seconds / full_seconds:.2f})" if point else "")
        rows.append(cells)
    return lines(["scheme", "planned share", *(name.replace("_", " ") for name in found)], rows)


def memory_table(path: Path) -> str:
    """A row a setting: accuracy, and the memory that training took beyond what the process had before it."""
    rows = (
        [in_words(p.setting), f"{spread(p.percent)} %", f"{p.grown_mb.mean():.0f} MB", f"{p.peak_mb.mean():.0f} MB"]
        for p in read_points(path)
    )
    return lines(["scheme", "test accuracy", "memory of training", "peak of the process"], rows)


def others_table(path: Path) -> str:
    """A row for each method of compare_others.py, a column a data set: accuracies after each of `COMPARED_SECONDS`."""
    cells: dict[str, dict[str, str]] = {}
    for data, one in _files(path).items():
        runs: dict[str, list[dict[str, str]]] = {}
        for row in read_rows(one):
            runs.setdefault(row["method"], []).append(row)
        for method, rows in runs.items():
            shown = [_accuracy_after(rows, seconds) for seconds in COMPARED_SECONDS]
            cells.setdefault(method, {})[data] = " · ".join(shown)
    columns = [*_files(path)]
    heads = [f"{name.replace('_', ' ')} (%)" for name in columns]
    shown_rows = ([METHODS_IN_WORDS[method], *(row.get(data, "") for data in columns)] for method, row in cells.items())
    return lines(["after 30 s · 1 · 2 · 5 minutes", *heads], shown_rows)


def _accuracy_after(rows: Iterable[Mapping[str, str]], seconds: int) -> str:
    """Mean over seeds of the best accuracy so far in percent, by the longest runs or by those of this length."""
    lengths, found = {int(row["seconds"]) for row in rows}, dict[str, list[float]]()
    wanted = seconds if seconds in lengths else max(lengths)
    for row in (row for row in rows if int(row["seconds"]) == wanted):
        for point in row["curve"].split():
            at, accuracy = map(float, point.split(":"))
            if at <= seconds + LATE_SECONDS:
                found.setdefault(row["seed"], []).append(100 * accuracy)
    return f"{np.mean([max(values) for values in found.values()]):.1f}" if found else "–"


def in_words(setting: str) -> str:
    """A setting for readers who do not know its name: "elastic 0.4, no cache" has a rho and a remark."""
    scheme = scheme_of(setting)
    rho, _, remark = setting.removeprefix(scheme).strip(", ").partition(", ")
    words = FIRST_WORDS[scheme][1] if scheme in FIRST_WORDS else scheme
    return ", ".join(part for part in (words, f"ρ = {rho}" if rho[:1].isdigit() else rho, remark) if part)


def _share(share: float) -> str:
    """A share of full training's time."""
    return f"1/{1 / share:g}" if 0 < share < 1 else f"{share:g}"


TABLES = {"all": table, "shares": shares_table, "waited": waited_table, "memory": memory_table, "others": others_table}


def draw(path: Path, title: str, x: str, label: str) -> None:
    """Accuracy over the field `x` of the points: a small dot a run, a marker the mean.

    Over time, a line joins the budgets of a setting; over memory, the settings of a scheme. An empty marker tells a
    setting from an earlier one of its scheme, which may be in the same place.
    """
    figure = plotting.new_figure(7, 4, title)
    axes = figure.add_subplot(xlabel=label, ylabel="test accuracy (%)")
    is_time = x == "seconds"
    found: dict[str, list[Point]] = {}
    for point in read_points(path):
        found.setdefault(point.setting if is_time else scheme_of(point.setting), []).append(point)
    seen: set[str] = set()
    for (name, points), marker in zip(found.items(), cycle(MARKERS), strict=False):
        look = plotting.look_of(FIRST_WORDS[scheme_of(name)][0])
        face = "none" if look.label in seen else None
        seen.add(look.label)
        ordered = sorted(points, key=lambda point: point.budget if is_time else getattr(point, x).mean())
        values = [np.array([getattr(point, x), point.percent]) for point in ordered]
        style = {"marker": marker if is_time else look.marker, "ls": look.dashes, "color": look.colour, "mfc": face}
        axes.plot(*np.transpose([one.mean(axis=1) for one in values]), ms=6, label=in_words(name), **style)
        axes.plot(*np.concatenate(values, axis=1), ".", color=look.colour, ms=4, alpha=0.5)
    if is_time:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.xaxis.set_minor_formatter(lambda x, _: f"{x:.0f}" if f"{x:.0f}"[0] in "2357" else "")  # others overlap
    else:
        axes.set_xlim(left=0)
    figure.legend(loc="outside right center", fontsize="small")
    save_figure(figure, path.with_suffix(""))


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
    for part, x, label in (
        ("equal_time", "seconds", "training time (s)"),
        ("memory", "grown_mb", "memory of training (MB)"),
    ):
        for data, path in _files(RESULTS / f"{part}.csv").items():
            draw(path, TITLES[data], x, label)


if __name__ == "__main__":
    utils.run_cli(main)
