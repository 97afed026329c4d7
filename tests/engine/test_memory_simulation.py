"""The simulated allocator: what requests touch, and that memory in use is never given away."""

from itertools import pairwise

import numpy as np
import pytest

from elastic_trainer.engine.memory_simulation import FIRST_REGION, SMALL, Allocator, Chunk

MB = 1 << 20


def test_freed_memory_is_taken_again_and_neighbours_are_joined():
    allocator = Allocator()
    chunks = [allocator.allocate(MB // 2) for _ in range(4)]
    assert allocator.touched == 2 * MB
    allocator.free(chunks[1])
    allocator.free(chunks[2])
    whole = allocator.allocate(MB)  # fits only into both
    assert (whole.region, whole.start) == (chunks[1].region, chunks[1].start) and allocator.touched == 2 * MB


def test_a_free_chunk_that_is_a_little_too_small_is_no_use():
    allocator = Allocator()
    first, second = allocator.allocate(MB), allocator.allocate(MB)
    allocator.free(first)
    allocator.allocate(MB + 1)
    assert allocator.touched >= 3 * MB
    allocator.free(second)


def test_the_smallest_chunk_that_is_large_enough_is_taken_and_split():
    allocator = Allocator()
    large, _, small, _ = (allocator.allocate(size) for size in (16 * MB, MB, 4 * MB, MB))
    allocator.free(large)
    allocator.free(small)
    taken = allocator.allocate(MB + MB // 2)
    assert (taken.region, taken.start) == (small.region, small.start)
    rest = allocator.allocate(2 * MB)
    assert (rest.region, rest.start) == (small.region, small.start + taken.size)


def test_regions_double_and_small_requests_count_while_they_are_in_use():
    allocator = Allocator()
    regions = {allocator.allocate(FIRST_REGION // 2).region for _ in range(6)}
    assert regions == {0, 1}, "2 MB, then 4 MB"
    before = allocator.touched
    for _ in range(3):
        allocator.free(allocator.allocate(SMALL - 1))
    assert allocator.touched == before + SMALL - 1


@pytest.mark.parametrize("seed", range(5))
def test_chunks_in_use_never_overlap_and_touched_covers_them(seed):
    rng, allocator = np.random.default_rng(seed), Allocator()
    in_use, most = list[tuple[int, Chunk]](), 0
    for _ in range(400):
        if in_use and rng.random() < 0.45:
            allocator.free(in_use.pop(rng.integers(len(in_use)))[1])
        else:
            size = int(rng.integers(SMALL, 8 * MB))
            in_use.append((size, allocator.allocate(size)))
        most = max(most, sum(size for size, _ in in_use))
        places = sorted((chunk.region, chunk.start, chunk.start + chunk.size) for _, chunk in in_use)
        assert all(one[0] != other[0] or one[2] <= other[1] for one, other in pairwise(places))
        assert allocator.touched >= most
    assert allocator.touched < 2 * most
