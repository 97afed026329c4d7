#!/usr/bin/env python
"""main.py with a variant of elastic training (`study_schemes`) in its place: the variant, then the flags of main.py."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from study_schemes import VARIANTS

import main
import train
import utils
from elastic_trainer.cli.parser import OneLineParser, one_of


def run() -> None:
    parser = OneLineParser(prog="train_variant.py", description=__doc__)
    parser.add_argument("variant", type=one_of([*VARIANTS]), metavar="VARIANT", help=", ".join(VARIANTS))
    variant = parser.parse_args(sys.argv[1:2]).variant
    del sys.argv[1]
    train.SCHEMES["elastic_training"] = partial(train.elastic_scheme, **VARIANTS[variant])
    main.main()


if __name__ == "__main__":
    utils.run_cli(run)
