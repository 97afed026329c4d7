#!/usr/bin/env python
"""How alike the importances of successive selections are, by how far these lie apart.

Reads the runs of the part `interval` of run_study.py that select by importance.

    python scripts/study/similarity.py --data sign_digits --seeds 2
"""

from __future__ import annotations

import argparse
import sys
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "figures"))

from plot_costs import similarity  # first: it sets the import path
from run_study import add_shared_flags
from study_runs import PARTS

import utils
from elastic_trainer.cli.parser import OneLineParser
from elastic_trainer.errors import UserError
from elastic_trainer.files import write_csv
from elastic_trainer.runs.reader import is_finished, read_run

COLUMNS = ("setting", "seed", "similarity")


def main() -> None:
    parser = OneLineParser(
        prog="similarity.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_shared_flags(parser)
    args = parser.parse_args()
    rows = []
    for run in PARTS["interval"](args.data, args.seeds):
        folder = run.folder(args.logdir)
        if run.train_type != "elastic_training" or not is_finished(folder):
            continue
        vectors = read_run(folder).selections().importance
        alike = [similarity(first, second) for first, second in pairwise(vectors)]
        if alike:
            rows.append([run.label, run.seed, sum(alike) / len(alike)])
    if not rows:
        raise UserError(f"--logdir {args.logdir}: holds no run of the part interval; see run_study.py interval")
    write_csv(args.results / f"similarity_{args.data}.csv", COLUMNS, rows)


if __name__ == "__main__":
    utils.run_cli(main)
