"""What a refusal names: the nearest that fit, found with few questions."""

from math import inf

import pytest

from elastic_trainer.memory.alternatives import MAX_NAMED, Alternative, larger_limit, named, of_batch, smaller_batch


@pytest.mark.parametrize("batch_size", [1, 2, 48, 64, 1024])
@pytest.mark.parametrize("room_mb", [99.0, 101.0, 130.0, 164.0, 300.0, 1100.0])
@pytest.mark.parametrize("bend", [0.9, 1.0, 1.1])
def test_the_largest_half_that_fits_is_found_with_few_traced_steps(batch_size, room_mb, bend):
    asked = []

    def needed_mb(rows):
        asked.append(rows)
        return 100 + rows**bend

    found = smaller_batch(needed_mb, batch_size, 100 + batch_size**bend, room_mb)
    halves = [batch_size >> k for k in range(1, batch_size.bit_length())]
    best = next((half for half in halves if 100 + half**bend <= room_mb), None)
    assert (found is None) == (best is None) and len(asked) <= 4
    assert found is None or best is None or best / 2 <= found <= best
    assert found == best or bend != 1.0


def test_the_nearest_three_are_named_and_what_does_not_fit_is_not():
    assert of_batch(64, 16) == (4.0, "--batch_size 16") and of_batch(64, None) is None
    assert larger_limit(1000, 800, 2000) == (pytest.approx(1.275), "--memory 1020M")
    for limit_mb, machine_mb in ((None, 2000), (inf, 2000), (800, 999)):
        assert larger_limit(1000, limit_mb, machine_mb) is None
    several = [Alternative(4.0, "d"), None, Alternative(1.5, "b"), Alternative(1.2, "a"), Alternative(2.0, "c")]
    assert named(several, "nothing") == "what fits: a, or b, or c" and MAX_NAMED == 3
    assert named([None], "nothing") == "nothing"
