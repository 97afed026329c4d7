#!/usr/bin/env python
"""Record what tensorflow-addons' SGDW does, so that a test can compare our SGD with decoupled weight decay with it.

tensorflow-addons 0.23.0 is archived and needs TensorFlow 2.15 or older, on Python 3.9 to 3.11. So this script runs in
a separate environment. Writes tests/data/sgdw_trajectory.json.

    python3.11 -m venv .venv-tfa && .venv-tfa/bin/pip install tensorflow==2.15.1 tensorflow-addons==0.23.0
    .venv-tfa/bin/python tests/data/record_sgdw.py
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import tensorflow as tf
import tensorflow_addons as tfa

OUTPUT = Path(__file__).with_name("sgdw_trajectory.json")
STEPS = 40
# The paper's setting, and one with a decay that is a large part of each step.
CASES = ({"learning_rate": 1e-4, "weight_decay": 5e-4}, {"learning_rate": 0.05, "weight_decay": 0.5})


def record() -> None:
    """Run SGDW as the paper's scripts do: rate and decay follow one cosine schedule, and the decay starts at lr·wd."""
    rng = np.random.default_rng(0)
    start = rng.normal(0, 1, (2, 3)).astype(np.float32)
    gradients = rng.normal(0, 1, (STEPS, 2, 3)).astype(np.float32)
    cases = []
    for case in CASES:
        rate, decay = (
            tf.keras.optimizers.schedules.CosineDecay(value, decay_steps=STEPS)
            for value in (case["learning_rate"], case["learning_rate"] * case["weight_decay"])
        )
        optimizer = tfa.optimizers.SGDW(learning_rate=rate, weight_decay=decay, momentum=0.9)
        variable = tf.Variable(start)
        weights = []
        for step, gradient in enumerate(gradients):
            # SGDW reads a scheduled decay at the optimizer's own step count.
            assert int(optimizer.iterations) == step
            optimizer.apply_gradients([(tf.constant(gradient), variable)])
            weights.append(variable.numpy().tolist())
        cases.append({**case, "momentum": 0.9, "weights": weights})
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    versions = {"tensorflow": tf.__version__, "tensorflow-addons": tfa.__version__}
    content = {"made_by": "tests/data/record_sgdw.py", "versions": versions, "steps": STEPS}
    content |= {"start": start.tolist(), "gradients": gradients.tolist(), "cases": cases}
    temporary = OUTPUT.with_suffix(".tmp")
    temporary.write_text(json.dumps(content) + "\n", encoding="utf-8")
    temporary.replace(OUTPUT)
    print(OUTPUT)


if __name__ == "__main__":
    record()
