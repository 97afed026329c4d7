"""The memory allocator of TensorFlow on a CPU, simulated: how many bytes a sequence of requests touches.

TensorFlow with oneDNN keeps what is freed and gives it to later tensors (`BFCAllocator` in its source): memory comes in
regions of doubling size, a request takes the smallest free chunk that is large enough, and free neighbours are joined.
So what a process takes never shrinks, and it is more than the tensors that are alive together: a free chunk may be a
little too small. For MobileNetV2 at half depth that is half as much again (docs/log/memory.md).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

SMALL = 1 << 18  # bytes; smaller requests go to the system's allocator
ALIGNED = 256
FIRST_REGION = 1 << 21
MAX_WASTE = 128 << 20  # a chunk with more to spare is split, as is one of twice the size
PAGE = 1 << 18  # the kernel counts smaller ones; this only bounds the time of the simulation


class Chunk(NamedTuple):
    """A part of a region; in this order free chunks are tried."""

    size: int
    region: int
    start: int


class Allocator:
    """What requests take, in bytes.

    Attributes:
        touched: by all requests so far.
    """

    def __init__(self) -> None:
        self._region_size = FIRST_REGION
        self._free: list[Chunk] = []
        self._starts: list[list[int]] = []  # of the chunks of each region
        self._chunks: dict[tuple[int, int], tuple[Chunk, bool]] = {}  # by region and start, and whether it is free
        self._pages: list[set[int]] = []
        self._small = self._most_small = self._large = 0

    @property
    def touched(self) -> int:
        return self._large + self._most_small

    def take(self, size: int) -> Chunk:
        """Memory of `size` bytes, above 0, until it is given back."""
        if size < SMALL:
            self._small += size
            self._most_small = max(self._small, self._most_small)
            return Chunk(size, -1, 0)
        size = -(-size // ALIGNED) * ALIGNED
        index = bisect_left(self._free, Chunk(size, -1, -1))
        if index == len(self._free):
            self._add_region(size)
            index = bisect_left(self._free, Chunk(size, -1, -1))
        found = self._free.pop(index)
        spare = found.size - size
        if found.size >= 2 * size or spare >= MAX_WASTE:
            rest = Chunk(spare, found.region, found.start + size)
            insort(self._starts[found.region], rest.start)
            self._keep(rest, True)
            found = found._replace(size=size)
        self._keep(found, False)
        pages, before = self._pages[found.region], len(self._pages[found.region])
        pages.update(range(found.start // PAGE, (found.start + size - 1) // PAGE + 1))
        self._large += (len(pages) - before) * PAGE
        return found

    def give_back(self, chunk: Chunk) -> None:
        """The memory that `take` returned is free again."""
        if chunk.region < 0:
            self._small -= chunk.size
            return
        starts = self._starts[chunk.region]
        index = bisect_left(starts, chunk.start)
        for neighbour in (index + 1, index - 1):
            if not 0 <= neighbour < len(starts):
                continue
            other, is_free = self._chunks[chunk.region, starts[neighbour]]
            if is_free:
                self._free.remove(other)
                del self._chunks[chunk.region, max(other.start, chunk.start)]
                starts.remove(max(other.start, chunk.start))
                chunk = Chunk(chunk.size + other.size, chunk.region, min(other.start, chunk.start))
        self._keep(chunk, True)

    def _keep(self, chunk: Chunk, is_free: bool) -> None:
        self._chunks[chunk.region, chunk.start] = chunk, is_free
        if is_free:
            insort(self._free, chunk)

    def _add_region(self, size: int) -> None:
        is_large = size > self._region_size
        while self._region_size < size:
            self._region_size *= 2
        self._starts.append([0])
        self._pages.append(set())
        self._keep(Chunk(self._region_size, len(self._starts) - 1, 0), True)
        if not is_large:
            self._region_size *= 2
