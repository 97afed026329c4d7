#!/usr/bin/env python
"""main.py with the schemes of `study_variants` as well: the same flags, such as --train_type elastic_training_greedy.

A run of such a scheme continues with this script too.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from study_variants import register_variants

import main
import utils
from elastic_trainer.errors import Stopped


def run() -> None:
    register_variants()
    try:
        main.main()
    except Stopped as stopped:
        message = str(stopped).replace("main.py", "scripts/study/train_variant.py")
        raise Stopped(stopped.number, message) from None


if __name__ == "__main__":
    utils.run_cli(run)
