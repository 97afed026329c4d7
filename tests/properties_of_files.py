"""Properties of files that the commands read, see `properties.py`: any of them may be damaged."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import keras
import numpy as np
from conftest import make_small_model
from hypothesis import strategies as st
from PIL import Image
from properties import DAMAGES, Damage, fresh, one_line, property_of, workplace
from small_images import encoded
from small_networks import as_if_trained, values

from elastic_trainer.datasets import decoding
from elastic_trainer.networks import pretrained
from elastic_trainer.networks.saved_model import load_model, save_model
from elastic_trainer.runs.checkpoint import Checkpoints, State
from elastic_trainer.system.errors import first_line
from elastic_trainer.timing.trace import read_trace

TRACE = Path(__file__).parent / "data" / "small_step.xplane.pb"

# --- checkpoints, weights, models -------------------------------------------------------------------------------------


@functools.cache
def checkpoint_files() -> dict[str, bytes]:
    checkpoints = Checkpoints(workplace() / "checkpoints")
    for step in (1, 2):
        arrays = {"model/a": np.arange(7.0) + step, "optimizer/b/c": np.full((2, 3), step, np.float32)}
        checkpoints.save(step, State(arrays, {"history": {"step": step}}))
    return {path.name: path.read_bytes() for path in checkpoints.folder.iterdir()}


@property_of(st.integers(1, 2), DAMAGES, st.booleans())
def a_damaged_checkpoint_is_skipped_and_nothing_saved_is_lost(step: int, damage: Damage, swaps: bool) -> None:
    """`swaps`: the two files have each other's name."""
    contents = checkpoint_files()
    if swaps:
        contents = dict(zip(contents, reversed(contents.values()), strict=True))
    name = f"step-{step:010}.npz"
    folder = workplace() / "checkpoints"
    contents = {**contents, name: damage(contents[name])}
    for each, content in contents.items():
        (folder / each).write_bytes(content)
    found = None
    with one_line():
        found = Checkpoints(folder).latest()
        assert found is not None
    assert found is not None, "the other one is intact"
    state = found.record["history"]["step"]
    newer = 1 if swaps else 2
    assert state in (1, 2) and (step == 2 or state == newer)
    np.testing.assert_array_equal(found.arrays["model/a"], np.arange(7.0) + state)
    np.testing.assert_array_equal(found.arrays["optimizer/b/c"], np.full((2, 3), state, np.float32))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == contents


@functools.cache
def model_files() -> tuple[keras.Model, dict[str, bytes]]:
    """The small network, and its weights in each kind of file."""
    model, folder = as_if_trained(make_small_model()), workplace() / "models"
    folder.mkdir()
    save_model(model, folder / "my.keras")
    model.save_weights(folder / "my.weights.h5")
    return model, {path.name: path.read_bytes() for path in folder.iterdir()}


def load_weights(name: str, content: bytes) -> None:
    """Load a changed file as `--weights` does: all weights are finite, or it is refused in a line."""
    model, path = model_files()[0], fresh(name)
    path.write_bytes(content)
    before = values(model.weights)
    with one_line():
        pretrained.load(model, model, path, f"{__file__}:small")
        assert all(np.isfinite(one).all() for one in values(model.weights))
    for weight, old in zip(model.weights, before, strict=True):
        weight.assign(old)
    assert path.read_bytes() == content
    path.unlink()


@property_of(st.sampled_from(["my.keras", "my.weights.h5"]), DAMAGES)
def damaged_weights_are_refused_or_finite(name: str, damage: Damage) -> None:
    load_weights(name, damage(model_files()[1][name]))


def load_saved_model(content: bytes) -> None:
    path = fresh("my.keras")
    path.write_bytes(content)
    with one_line():
        model = load_model(path, "--evaluate")
        assert all(np.isfinite(one).all() for one in values(model.weights))
    path.unlink()


@property_of(DAMAGES)
def a_damaged_model_is_refused_or_finite(damage: Damage) -> None:
    load_saved_model(damage(model_files()[1]["my.keras"]))


# --- traces and images ------------------------------------------------------------------------------------------------


@property_of(DAMAGES, st.sampled_from([None, 1, 3]))
def a_damaged_trace_is_refused_or_has_times(damage: Damage, steps: int | None) -> None:
    path = workplace() / "damaged.xplane.pb"
    path.write_bytes(damage(TRACE.read_bytes()))
    with one_line():
        trace = read_trace(path, steps)
        assert trace.op_ms and all(math.isfinite(ms) and ms >= 0 for ms in trace.op_ms.values())


@functools.cache
def images() -> dict[str, bytes]:
    """A photo in each format."""
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8))
    return {kind: encoded(image, kind) for kind in decoding.FORMATS} | {
        "progressive": encoded(image, "JPEG", progressive=True),
        "palette": encoded(image.convert("P"), "PNG", transparency=3),
    }


@property_of(st.sampled_from([*decoding.FORMATS, "progressive", "palette"]), DAMAGES)
def a_damaged_image_is_decoded_or_described_in_a_line(kind: str, damage: Damage) -> None:
    path = workplace() / "photo.jpg"
    path.write_bytes(damage(images()[kind]))
    try:
        pixels = decoding.read_photo(str(path), 8)
    except MemoryError:
        raise
    except Exception as error:
        line = first_line(error)
        assert line and "\n" not in line
    else:
        assert pixels.shape == (8, 8, 3) and pixels.dtype == np.uint8
