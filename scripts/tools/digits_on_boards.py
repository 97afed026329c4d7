#!/usr/bin/env python
"""Write the handwritten digits as photos of several boards, unevenly by class: for a fleet on one machine.

They are dark ink on white paper, which the demo's weights have not seen. All boards have the first digits in equal
parts, and each has digits that no other board has. Those of the last board, the slowest of the fleet, are rare. Boards
get training images alone; a server tests on those of the folder `all`.

    python scripts/tools/digits_on_boards.py logs/fleet/photos --boards 3
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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


def write_photos(folder: Path, examples: Iterable[tuple[Any, int]]) -> None:
    """Write each image, as dark ink on white paper, into the folder of its label, unless it is there."""
    for number, (pixels, label) in enumerate(examples):
        path = folder / str(label) / f"{number:04}.png"
        if not path.exists():
            with atomic_path(path) as temporary:
                Image.fromarray(255 - np.asarray(pixels)).save(temporary)


def write_all(folder: Path) -> None:
    """Write the images of all boards to `train`, and those to test on to `test`."""
    digits = read_digits()
    for name, part in (("train", digits.train), ("test", digits.test)):
        write_photos(folder / name, part.examples())


def main() -> None:
    parser = OneLineParser(prog="digits_on_boards.py", description=__doc__.partition("\n")[0])
    parser.add_argument("output", type=folder, metavar="DIR", help="gets folders board-1, board-2, … and all")
    parser.add_argument("--boards", type=whole_number(1, 3), default=3, metavar="N", help="default: %(default)s")
    args = parser.parse_args()
    examples = [*read_digits().train.examples()]
    places = owners(np.array([label for _, label in examples]), args.boards)
    write_all(args.output / "all")
    for board in range(args.boards):
        mine = [example for example, place in zip(examples, places, strict=True) if place == board]
        write_photos(args.output / f"board-{board + 1}", mine)
        labels = sorted({label for _, label in mine})
        print(f"{args.output / f'board-{board + 1}'}: {len(mine)} images, digits {labels}")


if __name__ == "__main__":
    utils.run_cli(main)
