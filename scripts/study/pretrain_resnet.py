#!/usr/bin/env python
"""Pretrain the study's second network, `study_networks.resnet`, on the letters of scripts/tools/pretrain_glyphs.py.

Takes about ten minutes on two cores.

    python scripts/study/pretrain_resnet.py resnet_glyphs.keras
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import keras
from pretrain_glyphs import LETTERS, SIZE, train_on_glyphs  # first: it sets the import path
from study_networks import resnet

import utils
from elastic_trainer.cli.parser import OneLineParser
from elastic_trainer.files import atomic_path
from elastic_trainer.options import file_to_write


def main() -> None:
    parser = OneLineParser(
        prog="pretrain_resnet.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=file_to_write, metavar="FILE.keras")
    args = parser.parse_args()
    keras.utils.set_random_seed(0)
    network = resnet((SIZE, SIZE, 3), len(LETTERS))
    accuracy = train_on_glyphs(network, seed=0, count=16_000, epochs=12)
    with atomic_path(args.output) as path:
        network.save(path)
    print(f"{args.output}: {accuracy:.1%} on newly drawn letters")


if __name__ == "__main__":
    utils.run_cli(main)
