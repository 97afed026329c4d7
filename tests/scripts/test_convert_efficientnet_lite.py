"""EfficientNet-Lite0 from PyTorch's file: every tensor is where it belongs, and no other code of a file runs."""

import collections
import io
import os
import pickle

import keras
import numpy as np
import pytest
from command_line import run_here
from convert_efficientnet_lite import MAGIC, converted, main, read_state
from study_networks import efficientnet_lite

from elastic_trainer.errors import UserError
from elastic_trainer.networks.tensors import tensor_names


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
    for module, name in (("torch", "FloatStorage"), ("torch._utils", "_rebuild_tensor_v2")):
        content = content.replace(f"c{__name__}\n{name}\n".encode(), f"c{module}\n{name}\n".encode())
    return content + b"".join(array.size.to_bytes(8, "little") + array.tobytes("A") for array in stored.values())


def test_tensors_come_out_as_they_went_in():
    rng = np.random.default_rng(0)
    tensors = {"a": rng.normal(size=(4, 3, 2, 5)).astype("f4"), "b": rng.normal(size=7).astype("f4")}
    found = read_state(io.BytesIO(legacy_file(tensors, transposed=("a",))))
    assert [*found] == ["a", "b"]
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(found[name], tensor)


def test_each_tensor_is_that_of_its_layer():
    keras.utils.set_random_seed(0)
    model = efficientnet_lite((64, 64, 3), 1000)
    rng = np.random.default_rng(1)
    wanted = [rng.uniform(0.5, 1, weight.shape).astype("f4") for weight in model.weights]
    model.set_weights(wanted)
    axes = {keras.layers.DepthwiseConv2D: (2, 3, 0, 1), keras.layers.Conv2D: (3, 2, 0, 1), keras.layers.Dense: (1, 0)}
    state = {}
    for place, layer in enumerate(model.layers):
        for kind, weight in enumerate(layer.get_weights()):
            order = axes.get(type(layer)) if weight.ndim > 1 else None
            state[f"{place}.{kind}"] = weight.transpose(order) if order else weight
        state[f"{place}.num_batches_tracked"] = np.array(1)
    images = rng.uniform(0, 255, (2, 64, 64, 3)).astype("f4")
    np.testing.assert_allclose(converted(state, 64)(images), model(images), rtol=1e-5)
    assert sum(np.prod(weight.shape) for weight in model.trainable_variables) == 4_652_008  # as published
    assert len(tensor_names(model)) == 149
    del state["3.0"]
    with pytest.raises(ValueError, match="tensors, not"):
        converted(state, 64)


def test_another_file_is_refused_and_none_of_its_code_runs(tmp_path):
    class Bad:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    path, output = tmp_path / "bad.pth", tmp_path / "x.keras"
    for content in (b"", b"text", pickle.dumps(Bad(), protocol=2), pickle.dumps(MAGIC, 2) + 3 * pickle.dumps(Bad(), 2)):
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"{path}: is not the file of EfficientNet-Lite0"):
            run_here(main, "convert_efficientnet_lite.py", path, output)
    assert not (tmp_path / "made").exists() and not output.exists()
