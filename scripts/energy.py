#!/usr/bin/env python
"""Add the energy that an external power meter recorded during training to a finished run.

python scripts/energy.py logs/my_run power.csv
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import utils
from elastic_trainer.runs.summary import add_power
from elastic_trainer.settings.flags import OneLineParser, existing_file, folder


def main() -> None:
    parser = OneLineParser(prog="energy.py", description=__doc__)
    parser.add_argument("run", type=folder, metavar="RUN", help="folder of the run")
    parser.add_argument("record", type=existing_file, metavar="FILE", help="a CSV file: a header, then time and watts")
    args = parser.parse_args()
    print(add_power(args.run, args.record))


if __name__ == "__main__":
    utils.run_cli(main)
