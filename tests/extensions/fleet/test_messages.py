"""Messages come out as they went in, and what a board replies is what it can be, or refused with the reason."""

import numpy as np
import pytest

from elastic_trainer.extensions.fleet.messages import (
    Parcel,
    about_of,
    losses_of,
    result_of,
    sums_arrays,
    sums_of,
    update_of,
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
        ({}, 0, "steps is 0"),
        ({}, float("inf"), "steps is inf"),
        ({}, 10**400, "steps is 1000"),
        ({}, None, "steps is None"),
    ],
)
def test_an_update_that_cannot_be_is_refused(changes, steps, why):
    with pytest.raises(ValueError, match=f"^{why}"), np.errstate(over="ignore"):
        update_of(Parcel("trained", {"steps": steps}, changes), 8, WEIGHTS)


def test_an_update_has_what_its_board_reports():
    changes = {"bias": np.full(4, 0.5, np.float16)}  # it may start at 0
    update = update_of(Parcel("trained", {"steps": 3, "seconds": 1.5}, changes), 8, WEIGHTS)
    assert (update.images, update.steps, update.changes["bias"].dtype) == (8, 3, np.float32)
    assert update.reported["seconds"] == 1.5 and update.reported["loss"] is None
    for seconds in (10**400, -1, float("nan"), "1"):
        with pytest.raises(ValueError, match="seconds is"):
            update_of(Parcel("trained", {"steps": 3, "seconds": seconds}, changes), 8, WEIGHTS)


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
    arrays = sums_arrays("all_", sums)
    for name, found in zip(sums._fields, sums_of(Parcel("sums", {}, arrays), "all_", 3, 5), strict=True):
        np.testing.assert_allclose(found, getattr(sums, name), rtol=1e-6)
    wrong = (
        {"counts": -sums.counts},
        {"counts": np.array(3)},
        {"means": sums.means[:2]},
        {"within": np.full(15, np.nan)},
    )
    for each in wrong:
        with pytest.raises(ValueError, match="its sums are"):
            sums_of(Parcel("sums", {}, {**arrays, **{f"all_{name}": one for name, one in each.items()}}), "all_", 3, 5)
    with pytest.raises(ValueError, match="no dense layer"):
        sums_of(Parcel("sums", {"none": "no dense layer"}), "all_", 3, 5)
    assert losses_of(Parcel("losses", {}, {"losses": np.zeros((6, 3))}), (6, 24)) is None
