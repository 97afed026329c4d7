"""Traces that a Jetson TX2 recorded, kept outside the repository."""

from pathlib import Path

import pytest

TX2 = Path(__file__).resolve().parents[2] / "shared" / "traces" / "jetson_tx2"


# By network: the least time per iteration of the operations under `gradient_tape`; medians may add up to a little less.
GRADIENT_MS = {"resnet50": 293.5, "mobilenetv2": 144.6, "vit": 628.4, "vgg16": 443.0}


def tx2_trace(name):
    """The path of a network's trace; skips the test if the file is missing."""
    path = TX2 / f"{name}.xplane.pb"
    if not path.is_file():
        pytest.skip("needs ../shared/traces")
    return path
