"""What all benchmarks share: their flags, and what they say of the network they measured.

Importing it puts the checkout on the import path, so each benchmark runs from anywhere; it is imported first.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from elastic_trainer.cli.options import _add_network_options, _filled_in, _OneLineParser, model_label

ROOT = Path(__file__).resolve().parents[2]


def parse_benchmark(prog: str, description: str | None, **more: dict[str, Any]) -> argparse.Namespace:
    """The options of a script that measures a network: those of profiler.py, `--quick`, `--output`, and `more`.

    Args:
        prog, description: for the help.
        more: further flags by name, with what `add_argument` takes.
    """
    parser = _OneLineParser(prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    _add_network_options(parser)
    parser.add_argument("--quick", action="store_true", help="a short try on fewer measurements")
    parser.add_argument("--output", type=Path, metavar="STEM", help="figure without its ending")
    for name, settings in more.items():
        parser.add_argument(f"--{name}", **settings)
    args = parser.parse_args()
    args.weights = args.weights or "none"  # time does not depend on them
    return _filled_in(args)


def measured_network(args: argparse.Namespace, kind: str) -> tuple[str, Path, dict[str, Any]]:
    """What a measuring script says of its network: figure's title, figure without its ending, first keys of its JSON.

    Args:
        args: of `parse_benchmark`.
        kind: what is measured; the figure's name begins with it.
    """
    label = model_label(args)
    title = f"{label}, {args.input_size}×{args.input_size}, batch {args.batch_size}"
    stem = args.output or Path("figures") / f"{kind}_{label}_{args.input_size}_{args.batch_size}"
    return title, stem, {key: getattr(args, key) for key in ("model_name", "alpha", "input_size", "batch_size")}
