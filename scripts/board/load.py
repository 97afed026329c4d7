#!/usr/bin/env python
"""Make board.keras, board.tflite and labels.txt of the weights.npz that a board trained.

python scripts/board/load.py logs/mine_board/weights.npz
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import utils
from elastic_trainer.settings.flags import OneLineParser, existing_file
from elastic_trainer.system.machine import load_tensorflow


def main() -> None:
    parser = OneLineParser(prog="load.py", description=__doc__)
    parser.add_argument("weights", type=existing_file, metavar="FILE", help="beside the export's files, or below them")
    args = parser.parse_args()
    load_tensorflow()
    from elastic_trainer.board.export import load_board

    print(load_board(args.weights))


if __name__ == "__main__":
    utils.run_cli(main)
