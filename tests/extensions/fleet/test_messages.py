"""Messages come out as they went in, and what a board replies is what it can be, or refused with the reason."""

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from elastic_trainer.extensions.fleet.messages import (
    KINDS,
    About,
    Parcel,
    about_of,
    losses_of,
    result_of,
    sums_arrays,
    sums_of,
    update_of,
    with_speed,
)
from elastic_trainer.training.feature_sums import FeatureSums

ARRAYS: dict[str, np.ndarray] = {
    "half": np.arange(6, dtype=np.float16).reshape(2, 3),
    "none": np.zeros((0, 4), np.float32),
    "one": np.array(3.5),
    "counts": np.array([1, 2**40]),
}
WEIGHTS = {"kernel": np.ones((3, 4), np.float32), "bias": np.zeros(4, np.float32)}
ABOUT = {"name": "a", "images": 8, "test_images": 2, "full_seconds": 2.0, "head_seconds": 1.0}


def test_a_parcel_comes_out_as_it_went_in():
    parcel = Parcel("train", {"rate": 0.1, "names": ["é", "b"], "test": None}, ARRAYS)
    found = Parcel.from_bytes(parcel.to_bytes())
    assert (found.kind, found.values) == (parcel.kind, parcel.values)
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found.arrays[name], array)
        assert found.arrays[name].dtype == array.dtype and found.arrays[name].shape == array.shape


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xff\xff\xff{}",
        Parcel("a", {}, ARRAYS).to_bytes()[:-1],
        Parcel("a").to_bytes() + b"x",
        (14).to_bytes(4, "little") + b'["a", 3, []]  ',
        (30).to_bytes(4, "little") + b'["a", {}, [["b", "O", [1]]]]  ',
        (34).to_bytes(4, "little") + b'["a", {}, [["b", "float32", [-1]]]]',
        (49).to_bytes(4, "little") + b'["a", {}, [["b", "float32", [9999999999999999999]]]',
        (4).to_bytes(4, "little") + b"null",
    ],
)
def test_other_bytes_are_refused(content):
    with pytest.raises(ValueError):
        Parcel.from_bytes(content)


@pytest.mark.parametrize(
    ("changes", "steps", "why"),
    [
        ({"other": np.zeros(4)}, 1, "the network has no tensor other"),
        ({"bias": np.zeros(1)}, 1, "bias has the shape"),
        ({"bias": np.full(4, np.nan)}, 1, "bias has a value that is not finite"),
        ({"bias": np.full(4, 1e300)}, 1, "bias has a value that is not finite"),
        ({"kernel": 1e6 * WEIGHTS["kernel"]}, 1, "kernel changes by"),
        ({"bias": np.ones(4)}, 21, "steps is 21"),
        ({}, 0, "steps is 0"),
        ({}, float("inf"), "steps is inf"),
        ({}, 10**400, "steps is 1000"),
        ({}, None, "steps is None"),
    ],
)
def test_an_update_that_cannot_be_is_refused(changes, steps, why):
    with pytest.raises(ValueError, match=f"^{why}"), np.errstate(over="ignore"):
        update_of(Parcel("trained", {"steps": steps}, changes), 8, 20, WEIGHTS)


def test_an_update_has_what_its_board_reports():
    changes = {"bias": np.full(4, 0.5, np.float16)}  # it may start at 0
    update = update_of(Parcel("trained", {"steps": 3, "seconds": 1.5}, changes), 8, 20, WEIGHTS)
    assert (update.images, update.steps, update.changes["bias"].dtype) == (8, 3, np.float32)
    assert update.reported["seconds"] == 1.5 and update.reported["loss"] is None
    for seconds in (10**400, -1, float("nan"), "1"):
        with pytest.raises(ValueError, match="seconds is"):
            update_of(Parcel("trained", {"steps": 3, "seconds": seconds}, changes), 8, 20, WEIGHTS)


def test_what_a_board_says_of_itself_and_of_tests_can_be():
    assert about_of(Parcel("ready", ABOUT)).head_seconds == 1.0
    for wrong in ({"images": 0}, {"full_seconds": 0.5}, {"images": 10**12}, {"head_seconds": None}):
        with pytest.raises(ValueError, match=r"\w+ is "):
            about_of(Parcel("ready", {**ABOUT, **wrong}))
    assert result_of(Parcel("tested", {"test": {"loss": 1.0, "accuracy": 0.5}, "test_images": 9}), 6).images == 6
    for test, images in (({"loss": 1.0, "accuracy": 1.5}, 3), ({"loss": 1.0, "accuracy": 0.5}, -6), (None, 3)):
        with pytest.raises(ValueError):
            result_of(Parcel("tested", {"test": test, "test_images": images}), 6)


def test_sums_come_out_as_they_went_in_and_others_are_refused():
    rng = np.random.default_rng(0)
    sums = FeatureSums.of(rng.normal(size=(9, 5)).astype(np.float32), np.arange(9) % 3, 3)
    sent = sums_arrays("all_", sums)
    for name, found in zip(sums._fields, sums_of(Parcel("sums", {}, sent), "all_", 3, 5, 9), strict=True):
        np.testing.assert_allclose(found, getattr(sums, name), rtol=1e-6)
    wrong = (
        {"counts": -sums.counts},
        {"counts": np.array(3)},
        {"means": sums.means[:2]},
        {"within": np.full(15, np.nan)},
        {"within": np.full(15, 1e300)},
        {"means": np.full((3, 5), 1e9)},
        {"counts": np.array([3, 3, 4])},
        {"counts": np.array([np.inf, 0, 0])},
        {"counts": np.array([2**62, 2**62, 2**63 - 1])},
    )
    for each in wrong:
        with pytest.raises(ValueError, match="its sums are"):
            sums_of(Parcel("sums", {}, {**sent, **{f"all_{name}": one for name, one in each.items()}}), "all_", 3, 5, 9)
    with pytest.raises(ValueError, match="no dense layer"):
        sums_of(Parcel("sums", {"none": "no dense layer"}), "all_", 3, 5, 9)
    read = sums_of(Parcel("sums", {}, sent), "all_", 3, 5, 9)
    assert (read.counts.dtype, read.means.dtype, read.within.dtype) == (np.int64, np.float64, np.float32)
    assert losses_of(Parcel("losses", {}, {"losses": np.zeros((6, 3))}), (6, 24)) is None


def test_a_change_of_weights_that_are_lost_is_refused():
    lost = {"bias": np.full(4, np.nan, np.float32)}
    with pytest.raises(ValueError, match="bias changes by"):
        update_of(Parcel("trained", {"steps": 1}, {"bias": np.ones(4)}), 8, 20, lost)


NUMBERS = st.one_of(
    st.integers(), st.floats(), st.just(10**400), st.none(), st.booleans(), st.text(max_size=3), st.lists(st.integers())
)
REPLIED = st.dictionaries(
    st.sampled_from(
        ["steps", "seconds", "loss", "test", "test_images", "images", "full_seconds", "head_seconds", "name"]
    ),
    st.one_of(NUMBERS, st.dictionaries(st.sampled_from(["loss", "accuracy"]), NUMBERS)),
)
SENT = st.dictionaries(
    st.sampled_from(["kernel", "bias", "all_counts", "all_means", "all_within", "losses"]),
    arrays(
        st.sampled_from([np.dtype(kind) for kind in KINDS]),
        st.sampled_from([(), (0,), (4,), (3, 4), (3,), (3, 5), (15,), (2, 2)]),
    ),
)


@settings(max_examples=300, deadline=None)
@given(st.builds(Parcel, st.sampled_from(["ready", "trained", "sums"]), REPLIED, SENT))
def test_any_reply_is_read_or_refused(sent):
    """What is read can be used: it is finite, and has the shapes and the bounds that the server counts on."""
    parcel = Parcel.from_bytes(sent.to_bytes())
    with np.errstate(all="ignore"), suppress(ValueError):
        update = update_of(parcel, 8, 20, WEIGHTS)
        assert 1 <= update.steps <= 20
        assert all(np.isfinite(c).all() and c.shape == WEIGHTS[n].shape for n, c in update.changes.items())
        about = with_speed(About("a", 8, 2, 2.0, 1.0), update.reported)
        assert 0 < about.head_seconds <= about.full_seconds < np.inf and about.images == 8
    with suppress(ValueError):
        about = about_of(parcel)
        assert about.images >= 1 and 0 < about.head_seconds <= about.full_seconds < np.inf
    with suppress(ValueError):
        result = result_of(parcel, 6)
        assert 0 <= result.images <= 6 and 0 <= result.accuracy <= 1 and np.isfinite(result.loss)
    with np.errstate(all="ignore"), suppress(ValueError):
        assert all(np.isfinite(part).all() for part in sums_of(parcel, "all_", 3, 5, 9))
    losses = losses_of(parcel, (2, 2))
    assert losses is None or np.isfinite(losses).all()
