"""Parcels come out as they went in, and anything else is refused."""

import numpy as np
import pytest

from elastic_trainer.extensions.fleet.parcel import Parcel

ARRAYS: dict[str, np.ndarray] = {
    "half": np.arange(6, dtype=np.float16).reshape(2, 3),
    "none": np.zeros((0, 4), np.float32),
    "one": np.array(3.5),
    "counts": np.array([1, 2**40]),
}


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
        (4).to_bytes(4, "little") + b"null",
    ],
)
def test_anything_else_is_refused(content):
    with pytest.raises(ValueError):
        Parcel.from_bytes(content)
