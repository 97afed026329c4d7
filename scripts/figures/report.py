#!/usr/bin/env python
"""One self-contained page of all figures that were made: pictures, numbers, settings, machine, the paper's claims.

python scripts/figures/report.py --scale quick
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import csv
import html
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import plotting  # first: it sets the import path
from paper_figures import FIGURES, REFERENCE
from plotting import Group

import utils
from elastic_trainer.cli.parser import OneLineParser
from elastic_trainer.errors import UserError
from elastic_trainer.files import write_text
from elastic_trainer.options import file_to_write
from elastic_trainer.runs.reader import SUMMARY
from elastic_trainer.settings import MAIN_FLAGS

FIG17 = REFERENCE["17ac"]  # final accuracy in % and hours
VARIANTS = {"ego": "elastic runs alone", "subproblems": "a, subproblems"}
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 60rem; padding: 1rem; color: #222 }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2.5rem }
img { max-width: 100%; height: auto } .scroll { overflow-x: auto }
table { border-collapse: collapse; font-size: 0.85rem } th, td { padding: 0.2rem 0.6rem; text-align: left }
tr:nth-child(even) { background: #f4f4f4 }
.confirmed { color: #00734f } .not { color: #b03a00 } .untested { color: #666 }
"""

Values = list[tuple[float, str]]  # what runs show of a claim, each with the runs that show it


def _complete(groups: Sequence[Group], train_type: str) -> list[Group]:
    """The runs of a scheme that were not limited to a few steps."""
    return [group for group in groups if group.train_type == train_type and not group.config["max_steps"]]


def _over_full(groups: Sequence[Group], of: Callable[[Group, Group], float], rho: float | None = None) -> Values:
    """`of` each group of elastic runs, of this rho if one is given, and full training of the same setting."""
    return [
        (of(elastic, full), f"{elastic.label} of {elastic.place[0]}")
        for elastic in _complete(groups, "elastic_training")
        for full in _complete(groups, "full_training")
        if elastic.place == full.place and elastic.runs[0].summary["epochs"] == full.runs[0].summary["epochs"]
        if rho in (None, elastic.rho)
    ]


def _claims(groups: Sequence[Group]) -> Iterator[tuple[str, Values, float, str]]:
    """The paper's claims: text, what the runs show, and the limit; words about the value start with "×" if it is lower.

    The largest value decides.
    """

    def gains(key: str) -> Values:
        return _over_full(groups, lambda elastic, full: full.mean(key) / elastic.mean(key))

    def lost(elastic: Group, full: Group) -> float:
        return 100 * (full.mean("final_accuracy") - elastic.mean("final_accuracy"))

    yield "up to 3.5 times faster than full training", gains("train_seconds"), 3.5, "× faster"
    yield "60 % fewer FLOPs (2.5 times fewer)", gains("train_flops"), 2.5, "× fewer FLOPs"
    yield "2 to 3 times less energy", gains("energy_joules"), 2.0, "× less energy"
    shares = [group.mean("selection_percent") for group in _complete(groups, "elastic_training")]
    overheads = [(float(np.median(shares)), "median")] if shares else []
    yield "selecting costs less than 1 % of training", overheads, 1, " % of training"
    losses = _over_full(groups, lost, rho=0.5)
    yield "no noticeable loss of accuracy at ρ = 0.5 (here: 1 point)", losses, 1, " points lost"
    known = [(group, *FIG17[group.paper_key]) for group in groups if group.paper_key in FIG17]
    less = [(percent - 100 * group.mean("final_accuracy"), group.label) for group, percent, _ in known]
    yield "the artifact's tolerance: at most 5 points less accurate than the paper", less, 5, " points less"
    longer = [(100 * (group.mean("train_seconds") / 3600 / hours - 1), group.label) for group, _, hours in known]
    yield "the artifact's tolerance: at most 10 % longer than the paper (TX2)", longer, 10, " % longer"


def claims(groups: list[Group]) -> str:
    """The claims as a table, with what the runs show, at any scale."""
    rows = []
    for text, values, limit, words in _claims(groups):
        verdict, style, seen = "not tested", "untested", "no run shows it"
        if found := [(value, name) for value, name in values if np.isfinite(value)]:
            (value, name), is_bound = max(found), not words.startswith("×")
            seen = f"{'at most ' if is_bound else ''}{value:.3g}{words}, {name}"
            is_true = value <= limit if is_bound else value >= limit
            verdict, style = ("confirmed", "confirmed") if is_true else ("not confirmed", "not")
        cells = f'<td>{html.escape(text)}</td><td class="{style}">{verdict}</td><td>{html.escape(seen)}</td>'
        rows.append(f"<tr>{cells}</tr>")
    return _table(_row(["the paper", "", "here"], "th"), rows)


def _table(head: str, rows: Sequence[str]) -> str:
    return f'<div class="scroll"><table>{head}{"".join(rows)}</table></div>'


def _row(cells: Iterable[object], tag: str = "td") -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(str(cell))}</{tag}>' for cell in cells)}</tr>"


def heading(name: str) -> str:
    """A figure's number, what it shows, and on what the paper shows that; the picture itself says what was run here."""
    figure, *variant = name.split("_")
    title = f"{_number(figure)}{''.join(f', {VARIANTS[one]}' for one in variant)}: {FIGURES[figure].title}"
    return f"{title} (in the paper: {FIGURES[figure].paper})" if FIGURES[figure].paper else title


def _number(figure: str) -> str:
    return f"Fig {figure}" if figure[0].isdigit() else f"Table {figure.removeprefix('table')}"


def section(name: str, stem: Path) -> str:
    """The figure `name`: its picture, and its numbers in a section that opens on a click; `stem`: of its files.

    Raises:
        UserError: one of its files is missing, empty or damaged.
    """
    table, png = (stem.with_name(f"{stem.name}.{ending}") for ending in ("csv", "png"))
    rows, picture = list[list[str]](), ""
    with contextlib.suppress(OSError, ValueError, csv.Error), table.open(newline="", encoding="utf-8") as file:
        rows = [*csv.reader(file)]
    with contextlib.suppress(OSError):
        picture = base64.b64encode(png.read_bytes()).decode()
    for path, content in ((table, rows), (png, picture)):
        if not content:
            raise UserError(f"{path}: is missing, empty or damaged; remove {table.name} and draw the figure again")
    title = html.escape(heading(name))
    numbers = _table(_row(rows[0], "th"), [_row(map(_short, row)) for row in rows[1:]])
    return (
        f'<h2 id="{name}">{title}</h2><img alt="{title}" src="data:image/png;base64,{picture}">'
        f"<details><summary>numbers</summary>{numbers}</details>"
    )


def _short(cell: str) -> str:
    try:
        return f"{float(cell):.5g}"
    except ValueError:
        return cell


def settings(groups: Sequence[Group]) -> str:
    """The machines and versions of all runs, what they have in common, and each run with what differs."""
    runs = [run for group in groups for run in group.runs]
    values = {name: [run.config.get(name) for run in runs] for name, flag in MAIN_FLAGS.items() if not flag.is_free}
    differs = [name for name, of_runs in values.items() if len({*map(str, of_runs)}) > 1]
    common = ", ".join(f"{name} {of_runs[0]}" for name, of_runs in values.items() if name not in differs and of_runs)
    rows, machines = [], dict[str, None]()
    for run in runs:
        results = (f"{run.summary['final_accuracy']:.1%}", f"{run.summary['train_seconds'] / 60:.1f}")
        rows.append(_row([run.folder.name, *(run.config.get(name) for name in differs), *results]))
        place = run.config["environment"]
        packages = ", ".join(f"{package} {version}" for package, version in place["packages"].items())
        machine = f"{place['processor']}, {place['usable_cores']} cores, {place['system']}"
        machine += f"; Python {place['python']}, {packages}"
        machines[f"<li>{html.escape(machine)}</li>"] = None
    table = _table(_row(["run", *differs, "accuracy", "minutes"], "th"), rows)
    shown = f"<summary>all {len(runs)} runs</summary><p>{html.escape(common)}</p>{table}"
    return f"<ul>{''.join(machines)}</ul><details>{shown}</details>"


def page(scale: str, logdir: Path, figures: Path) -> str:
    """The page, figures in the order of their numbers. Raises `UserError` if none was made, or one is damaged."""
    stems = {name: figures / f"figure{name}_{scale}" for one in FIGURES for name in (one, f"{one}_ego")}
    stems["13_subproblems"] = figures / f"figure13_{scale}_subproblems"
    order = [*FIGURES]
    made = [name for name, stem in stems.items() if stem.with_name(f"{stem.name}.csv").is_file()]
    made.sort(key=lambda name: order.index(name.partition("_")[0]))
    missing = ", ".join(_number(name) for name in FIGURES if name not in made)
    if not made:
        raise UserError(f"{figures}: holds no figure of scale {scale}; make one: run_figure15.sh --scale {scale}")
    groups = plotting.group_runs(sorted(path.parent for path in logdir.glob(f"*/{SUMMARY}")))
    note = (
        "Small runs: they show that everything works, not what the paper measured."
        if scale == "quick"
        else "The paper's settings, except for what each figure says above it."
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>ElasticTrainer: figures, {scale}</title><style>{STYLE}</style>"
        f"<h1>ElasticTrainer: the paper's figures, {scale}</h1>"
        f"<p>{note}{f' Not made: {missing}.' if missing else ''}</p>"
        f"<h2>Claims</h2>{claims(groups)}<h2>Settings</h2>{settings(groups)}"
        f"{''.join(section(name, stems[name]) for name in made)}</html>\n"
    )


def main() -> None:
    parser = OneLineParser(prog="report.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=("full", "quick"), default="full")
    parser.add_argument("--logdir", type=Path, help="default: logs/figures_<scale>")
    parser.add_argument("--figures", type=Path, default=Path("figures"), help="default: %(default)s")
    parser.add_argument("--output", type=file_to_write, help="default: figures/report_<scale>.html")
    args = parser.parse_args()
    output = args.output or args.figures / f"report_{args.scale}.html"
    logdir = args.logdir or Path("logs") / f"figures_{args.scale}"
    write_text(output, page(args.scale, logdir, args.figures))
    print(f"report: {output}")


if __name__ == "__main__":
    utils.run_cli(main)
