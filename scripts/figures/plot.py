#!/usr/bin/env python
"""Draw finished runs as a figure or table of the paper.

curves            accuracy and loss over time, and a table (Figs 15 and 16)
bars              one number for each scheme, see --quantity (Figs 17, 19, 20, 22 and 23)
flops             FLOPs of each epoch (Fig 18)
maps              which tensors train in which epoch (Fig 21)
layers            accuracy and step time over how many of the last layers train (Fig 2)
importance        similarity of importance and overhead, over interval and batch size (Fig 7)
solver            resulting time and the solver's overhead over T_q (Fig 13b)
time_to_accuracy  speedup over the best baseline at equal accuracy (Table 2)

    python scripts/figures/plot.py curves logs/a logs/b
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import plot_accuracy_time
import plot_bars
import plot_costs
import plotting
from plotting import Group

import utils
from elastic_trainer.cli.parser import OneLineParser
from elastic_trainer.options import stem_to_write

# (groups, stem, scale=…), and with reference=… if the paper's values can be marked
KINDS: dict[str, Callable[..., None]] = {
    "curves": plot_accuracy_time.draw,
    "bars": plot_bars.draw,
    "flops": plot_costs.draw_flops,
    "maps": plot_costs.draw_maps,
    "layers": plot_costs.draw_layers,
    "importance": plot_costs.draw_importance,
    "solver": plot_costs.draw_solver,
    "time_to_accuracy": plot_costs.draw_time_to_accuracy,
}


def draw(
    kind: str,
    groups: Sequence[Group],
    stem: Path,
    quantities: Sequence[str] = (),
    reference: plotting.Reference = None,
    scale: str = "full",
) -> None:
    """Draw a figure, and print a table beside curves.

    Args:
        kind: a key of `KINDS`.
        groups: runs to draw.
        stem: of the files.
        quantities: of bars, keys of `plot_bars.QUANTITIES`.
        reference: values of the paper, if they are to be marked; only kinds that can mark them take it.
        scale: see `plotting.new_figure`.
    """
    if kind == "curves":
        print(plot_accuracy_time.table(groups))
    marks = {} if reference is None else {"reference": reference}
    KINDS[kind](groups, *([quantities] if kind == "bars" else []), stem, scale=scale, **marks)


def main() -> None:
    parser = OneLineParser(prog="plot.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=[*KINDS])
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder of a run, such as logs/<run_name>")
    parser.add_argument("--output", type=stem_to_write, metavar="STEM", help="default: figures/<kind>")
    parser.add_argument(
        "--quantity", nargs="+", choices=[*plot_bars.QUANTITIES], default=["accuracy", "hours"], help="of bars"
    )
    args = parser.parse_args()
    groups = plotting.group_runs(args.runs)
    if args.kind == "curves":
        plot_accuracy_time.check_alike(groups)
    draw(args.kind, groups, args.output or Path("figures") / args.kind, args.quantity)


if __name__ == "__main__":
    utils.run_cli(main)
