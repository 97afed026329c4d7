"""Digests by which photos are known again.

A board gets a copy of this file (`board.export`), so it imports nothing but NumPy and Python, from 3.6 on.
"""

import hashlib
from typing import Collection, Dict, Set, Tuple

import numpy as np


def digest(pixels: np.ndarray) -> int:
    """A digest of 64 bits of an image, uint8 [size, size, 3]: the same however it is turned or mirrored."""
    half = (len(pixels) + 1) // 2
    total = pixels[:half].astype(np.uint16) + pixels[::-1][:half]
    total = total[:, :half] + total[:, ::-1][:, :half]
    total = total + total.transpose(1, 0, 2)  # of all eight ways to turn it, of which a quarter says all
    return int.from_bytes(hashlib.blake2b(total.tobytes(), digest_size=8).digest(), "big")


def tested_digests(photos: Collection[Tuple[int, int]], fraction: float) -> Set[int]:
    """The digests of the photos that are for testing, from the label and the digest of each.

    A digest is an even draw from 0 to 2^64, and those below `fraction` of that are for testing. So a photo stays where
    it is whatever is added, removed, renamed or copied, and copies of a photo stay together. Only in a class that would
    be left without test photos, its smallest digest is tested nevertheless; in one that would be left without training
    photos, the largest trains.
    """
    tested = {number for _, number in photos if number < fraction * 2**64}
    of_class: Dict[int, Set[int]] = {}
    for label, number in photos:
        of_class.setdefault(label, set()).add(number)
    for numbers in of_class.values():
        if numbers.isdisjoint(tested):
            tested.add(min(numbers))
        if numbers <= tested:
            tested.remove(max(numbers))
    return tested
