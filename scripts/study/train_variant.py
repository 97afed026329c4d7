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
from elastic_trainer.cli.parser import one_of


def run() -> None:
    variant = VARIANTS[one_of([*VARIANTS])(sys.argv.pop(1))]
    train.SCHEMES["elastic_training"] = partial(train.elastic_scheme, **variant)
    main.main()


if __name__ == "__main__":
    utils.run_cli(run)
