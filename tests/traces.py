"""Traces that a Jetson TX2 recorded, kept outside the repository."""

from pathlib import Path

import pytest

TX2 = Path(__file__).resolve().parents[3] / "shared" / "traces" / "jetson_tx2"


# Per iteration, of the operations under `gradient_tape`: what each network takes at least.
GRADIENT_MS = {"resnet50": 293.5, "mobilenetv2": 144.6, "vit": 628.4, "vgg16": 444.0}


def tx2_trace(name):
    path = TX2 / f"{name}.xplane.pb"
    if not path.is_file():
        pytest.skip("../shared/traces is not here")
    return path
