"""What all benchmarks share: their flags, and how they report the network that they measured.

Importing this module puts the checkout on the import path, so a benchmark starts from any folder. It is imported first.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from elastic_trainer.cli.commands import fill_in_defaults
from elastic_trainer.cli.flags import add_flags, main_parser, profiler_parser
from elastic_trainer.cli.parser import OneLineParser
from elastic_trainer.errors import figure_text
from elastic_trainer.networks.names import model_label
from elastic_trainer.options import built, stem_to_write
from elastic_trainer.settings import NETWORK, PROFILER_FLAGS, NetworkSettings

if TYPE_CHECKING:
    pass

ROOT = Path(__file__).resolve().parents[2]
PAPER_RHOS = (0.35, 0.4, 0.5, 0.6, 0.7)  # the budgets of the paper's Figs 17 and 18


def parse_benchmark(
    prog: str, description: str | None, num_classes: int = 10, **more: dict[str, Any]
) -> tuple[NetworkSettings, argparse.Namespace]:
    """The network to measure, and all flags: those of the network, `--quick`, `--output`, and `more`.

    Args:
        prog, description: for the help.
        num_classes: of the network, if the flag is not given.
        more: further flags by name, with what `add_argument` takes.
    """
    parser = OneLineParser(
        [main_parser, profiler_parser],
        prog=prog,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser, {name: flag for name, flag in PROFILER_FLAGS.items() if flag.section == NETWORK})
    parser.add_argument("--quick", action="store_true", help="a short try with fewer measurements")
    parser.add_argument("--output", type=stem_to_write, metavar="STEM", help="figure without its ending")
    for name, settings in more.items():
        parser.add_argument(f"--{name}", **settings)
    args = parser.parse_args()
    args.weights = args.weights or "none"  # time does not depend on them
    fill_in_defaults(args)
    return built(NetworkSettings, vars(args)).with_classes(num_classes), args


def measured_network(network: NetworkSettings, kind: str, output: Path | None) -> tuple[str, Path, dict[str, Any]]:
    """How a benchmark reports its network: the figure's title, its path without ending, and the JSON's first keys.

    Args:
        network: that was measured.
        kind: what is measured; the figure's name starts with it.
        output: the figure's path if the user named one.
    """
    label = model_label(network.model_name, network.alpha)
    title = f"{figure_text(label)}, {network.input_size}×{network.input_size}, batch {network.batch_size}"
    stem = output or Path("figures") / f"{kind}_{label}_{network.input_size}_{network.batch_size}"
    return title, stem, {key: getattr(network, key) for key in ("model_name", "alpha", "input_size", "batch_size")}


def print_result(record: dict[str, Any], stem: Path) -> None:
    """Print where the figure is and, as the last line, the result as one JSON object."""
    print(f"figure: {stem}.pdf and .png")
    print(json.dumps(record))
