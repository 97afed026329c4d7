#!/usr/bin/env python
"""One self-contained page of all figures that were made: pictures, numbers, settings, machine, the paper's claims.

A claim is held or not by the runs under the log folder, whatever their scale: the page says on what.

    python scripts/report.py --scale quick
"""

from __future__ import annotations

import argparse
import base64
import csv
import html
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paper_figures
import plotting
from paper_figures import FIGURES
from plotting import FinishedRun, Group

import utils
from utils import UserError

VARIANTS = {"ego": "elastic runs alone", "subproblems": "a, subproblems"}
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 60rem; padding: 1rem; color: #222 }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2.5rem }
img { max-width: 100%; height: auto } .scroll { overflow-x: auto }
table { border-collapse: collapse; font-size: 0.85rem } th, td { padding: 0.2rem 0.6rem; text-align: left }
tr:nth-child(even) { background: #f4f4f4 } .held { color: #00734f } .not { color: #b03a00 } .untested { color: #666 }
"""


class Claim(NamedTuple):
    """Something the paper says, and what the runs say to it: (held, in words), None where they do not tell."""

    text: str
    check: Callable[[list[Group]], tuple[bool, str] | None]


def _pairs(groups: Sequence[Group]) -> Iterator[tuple[Group, Group]]:
    """Each group of elastic runs with the full training of the same network and data; not of a few steps alone."""
    whole = [group for group in groups if not group.first.config["max_steps"]]
    for group in whole:
        for full in whole:
            kinds = [one.first.summary["train_type"] for one in (group, full)]
            length = [one.first.summary["epochs"] for one in (group, full)]
            if kinds == ["elastic_training", "full_training"] and group.place == full.place and length[0] == length[1]:
                yield group, full


def _ratio(key: str) -> Callable[[Group, Group], float]:
    def of(run: FinishedRun) -> float | None:
        value = run.summary.get(key)
        return None if value is None else float(value)

    return lambda elastic, full: full.mean(of) / elastic.mean(of)


def _largest(key: str, least: float, words: str) -> Callable[[list[Group]], tuple[bool, str] | None]:
    def check(groups: list[Group]) -> tuple[bool, str] | None:
        found = [(_ratio(key)(*pair), pair[0]) for pair in _pairs(groups)]
        found = [(ratio, group) for ratio, group in found if np.isfinite(ratio)]
        if not found:
            return None
        ratio, group = max(found, key=lambda one: one[0])
        return ratio >= least, f"{ratio:.2f}× {words}, {group.label} of {plotting.network(group.first)}"

    return check


def _overhead(groups: list[Group]) -> tuple[bool, str] | None:
    steady = [group for group in groups if group.first.summary["train_type"] == "elastic_training"]
    shares = [
        group.mean(lambda run: run.summary["selection_percent"])
        for group in steady
        if not group.first.config["max_steps"]
    ]
    return (float(np.median(shares)) < 1, f"median {np.median(shares):.2g} % of training") if shares else None


def _accuracy(points: float) -> Callable[[list[Group]], tuple[bool, str] | None]:
    def check(groups: list[Group]) -> tuple[bool, str] | None:
        losses = [
            (
                full.mean(lambda run: run.summary["final_accuracy"])
                - elastic.mean(lambda run: run.summary["final_accuracy"]),
                elastic,
            )
            for elastic, full in _pairs(groups)
            if elastic.first.summary["rho"] == 0.5
        ]
        if not losses:
            return None
        worst, group = max(losses, key=lambda one: one[0])
        return (
            100 * worst <= points,
            f"at ρ = 0.5 at most {100 * worst:.1f} points lost ({plotting.network(group.first)})",
        )

    return check


def _as_the_paper(quantity: int, words: str) -> Callable[[list[Group]], tuple[bool, str] | None]:
    """Final accuracy (0) and hours (1) of runs with the paper's setting against its own, on a Jetson TX2 (Fig 17)."""

    def check(groups: list[Group]) -> tuple[bool, str] | None:
        found = []
        for group in groups:
            told = paper_figures.REFERENCE["17ac"].get(group.paper_key)
            if told is not None:
                percent = 100 * group.mean(lambda run: run.summary["final_accuracy"])
                hours = group.mean(lambda run: run.summary["train_seconds"]) / 3600
                worse = told[0] - percent if quantity == 0 else 100 * (hours / told[1] - 1)
                found.append((worse, group.label))
        if not found:
            return None
        worse, label = max(found)
        return worse <= (5, 10)[quantity], f"at most {worse:.1f} {words} ({label})"

    return check


CLAIMS = (
    Claim("up to 3.5 times faster than full training", _largest("train_seconds", 3.5, "faster")),
    Claim("60 % fewer FLOPs (2.5 times fewer)", _largest("train_flops", 2.5, "fewer FLOPs")),
    Claim("2 to 3 times less energy", _largest("energy_joules", 2.0, "less energy")),
    Claim("selecting costs less than 1 % of training", _overhead),
    Claim("no noticeable loss of accuracy (here: 1 point)", _accuracy(1)),
    Claim("the artifact's tolerance: at most 5 points less accurate than the paper", _as_the_paper(0, "points less")),
    Claim("the artifact's tolerance: at most 10 % longer than the paper (TX2)", _as_the_paper(1, "% longer")),
)


def claims(groups: list[Group]) -> str:
    rows = []
    for claim in CLAIMS:
        result = claim.check(groups)
        verdict, kind = (
            ("not tested", "untested") if result is None else ("held", "held") if result[0] else ("not held", "not")
        )
        seen = "no run tells" if result is None else result[1]
        rows.append(
            f'<tr><td>{html.escape(claim.text)}</td><td class="{kind}">{verdict}</td><td>{html.escape(seen)}</td></tr>'
        )
    return _table(_row(["the paper", "", "here"], "th"), rows)


def _table(head: str, rows: Sequence[str]) -> str:
    return f'<div class="scroll"><table>{head}{"".join(rows)}</table></div>'


def _row(cells: Iterable[object], tag: str = "td") -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(str(cell))}</{tag}>' for cell in cells)}</tr>"


def section(name: str, stem: Path) -> str:
    """A figure: its picture and, folded away, its numbers."""
    picture = base64.b64encode(stem.with_name(f"{stem.name}.png").read_bytes()).decode()
    with stem.with_name(f"{stem.name}.csv").open(newline="", encoding="utf-8") as file:
        head, *lines = csv.reader(file)
    figure, *variant = name.split("_")
    number = f"Fig {figure}" if figure[0].isdigit() else f"Table {figure.removeprefix('table')}"
    title = html.escape(f"{number}{''.join(f', {VARIANTS[one]}' for one in variant)}: {FIGURES[figure].title}")
    numbers = _table(_row(head, "th"), [_row(map(_short, line)) for line in lines])
    return (
        f'<h2 id="{name}">{title}</h2><img alt="{title}" src="data:image/png;base64,{picture}">'
        f"<details><summary>numbers</summary>{numbers}</details>"
    )


def _short(cell: str) -> str:
    try:
        return f"{float(cell):.5g}"
    except ValueError:
        return cell


def _place(environment: dict[str, Any]) -> str:
    packages = ", ".join(f"{package} {version}" for package, version in environment["packages"].items())
    machine = f"{environment['processor']}, {environment['usable_cores']} cores, {environment['system']}"
    return f"{machine}; Python {environment['python']}, {packages}"


def settings(groups: Sequence[Group]) -> str:
    """Each run with what decides its result, and the machines and versions they ran with."""
    keys = (
        "model_name",
        "dataset_name",
        "train_type",
        "rho",
        "input_size",
        "batch_size",
        "weights",
        "num_epochs",
        "max_steps",
        "optimizer",
        "learning_rate",
        "interval",
        "importance_batches",
        "trained_layers",
        "seed",
    )
    runs = [run for group in groups for run in group.runs]
    rows = []
    for run in runs:
        results = (f"{run.summary['final_accuracy']:.1%}", f"{run.summary['train_seconds'] / 60:.1f}")
        rows.append(_row([*(run.config.get(key) for key in keys), *results]))
    places = dict.fromkeys(_place(run.config["environment"]) for run in runs)
    machines = "".join(f"<li>{html.escape(place)}</li>" for place in places)
    table = _table(_row([*keys, "accuracy", "minutes"], "th"), rows)
    return f"<ul>{machines}</ul><details><summary>all {len(runs)} runs</summary>{table}</details>"


def page(scale: str, logdir: Path, figures: Path) -> str:
    """The page. Raises `UserError` where no figure of this scale was made."""
    stems = {name: figures / f"figure{name}_{scale}" for name in FIGURES}
    missing = [name for name, stem in stems.items() if not stem.with_name(f"{stem.name}.csv").is_file()]
    stems |= {f"{name}_ego": figures / f"figure{name}_ego_{scale}" for name in paper_figures.EGO}
    stems["13_subproblems"] = figures / f"figure13_{scale}_subproblems"
    made = {name: stem for name, stem in stems.items() if stem.with_name(f"{stem.name}.csv").is_file()}
    if not made:
        raise UserError(f"{figures}: holds no figure of scale {scale}; make one: run_figure15.sh --scale {scale}")
    groups = plotting.group_runs(sorted(path.parent for path in logdir.glob("*/summary.json")))
    note = (
        "Small runs: they show that everything works, not what the paper measured."
        if scale == "quick"
        else "The paper's settings but for what each figure says above it."
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>ElasticTrainer: figures, {scale}</title><style>{STYLE}</style>"
        f"<h1>ElasticTrainer: the paper's figures, {scale}</h1>"
        f"<p>{note}{f' Not made: {html.escape(chr(44).join(missing))}.' if missing else ''}</p>"
        f"<h2>Claims</h2>{claims(groups)}<h2>Settings</h2>{settings(groups)}"
        f"{''.join(section(name, stem) for name, stem in made.items())}</html>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=("full", "quick"), default="full")
    parser.add_argument("--logdir", type=Path, help="default: logs/figures_<scale>")
    parser.add_argument("--figures", type=Path, default=Path("figures"), help="default: %(default)s")
    parser.add_argument("--output", type=Path, help="default: figures/report_<scale>.html")
    args = parser.parse_args()
    output = args.output or args.figures / f"report_{args.scale}.html"
    utils.write_text(output, page(args.scale, args.logdir or Path("logs") / f"figures_{args.scale}", args.figures))
    print(f"report: {output}")


if __name__ == "__main__":
    utils.run_cli(main)
