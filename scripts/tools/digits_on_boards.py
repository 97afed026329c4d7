#!/usr/bin/env python
"""Write the handwritten digits as photos of several boards, unevenly by class: for a fleet on one machine.

All boards have the first digits in equal parts, and each has digits that no other board has. Those of the last board,
the slowest of the fleet, are rare. Only training images are written; a server with `--dataset_name digits` tests on the
others.

    python scripts/tools/digits_on_boards.py logs/fleet/photos --boards 3
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from PIL import Image

import utils
from elastic_trainer.cli.parser import OneLineParser
from elastic_trainer.datasets.sources import read_digits
from elastic_trainer.files import atomic_path
from elastic_trainer.options import folder, whole_number

SHARED = 4  # digits that all boards have; the others belong to one board each
RARE = 3  # of as many images of the last board's own digits, one is there


def own_digits(boards: int) -> list[np.ndarray]:
    """The digits that each board has alone."""
    return np.array_split(np.arange(SHARED, 10), boards)


def owners(labels: np.ndarray, boards: int) -> np.ndarray:
    """The board, int [images], of each image of labels int [images]; -1: none."""
    turn = np.zeros(len(labels), int)
    for label in np.unique(labels):
        turn[labels == label] = np.arange(np.count_nonzero(labels == label))
    own = own_digits(boards)
    places = turn % boards
    for board, digits in enumerate(own):
        places[np.isin(labels, digits)] = board
    places[np.isin(labels, own[-1]) & (turn % RARE > 0)] = -1
    return places


def main() -> None:
    parser = OneLineParser(prog="digits_on_boards.py", description=__doc__.partition("\n")[0])
    parser.add_argument("output", type=folder, metavar="DIR", help="gets a folder board-1, board-2, … for each board")
    parser.add_argument("--boards", type=whole_number(1, 3), default=3, metavar="N", help="default: %(default)s")
    args = parser.parse_args()
    examples = [*read_digits().train.examples()]
    places = owners(np.array([label for _, label in examples]), args.boards)
    for number, ((pixels, label), board) in enumerate(zip(examples, places, strict=True)):
        path = args.output / f"board-{board + 1}" / str(label) / f"{number:04}.png"
        if board >= 0 and not path.exists():
            with atomic_path(path) as temporary:
                Image.fromarray(np.asarray(pixels)).save(temporary)
    for board in range(args.boards):
        labels = [label for (_, label), place in zip(examples, places, strict=True) if place == board]
        print(f"{args.output / f'board-{board + 1}'}: {len(labels)} images, digits {sorted({*labels})}")


if __name__ == "__main__":
    utils.run_cli(main)
