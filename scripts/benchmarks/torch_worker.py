"""PyTorch beside TensorFlow: an environment of its own, and a worker process in it that runs steps on request."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

import numpy as np
from common import ROOT

from elastic_trainer.errors import UserError
from elastic_trainer.machine import cores
from elastic_trainer.networks.names import MODEL_NAMES
from elastic_trainer.settings import NetworkSettings

ENVIRONMENT, REQUIREMENTS = ROOT / ".venv-torch", ROOT / "requirements-torch.txt"
WORKER = Path(__file__).with_name("torch_steps.py")


def check_network(network: NetworkSettings) -> None:
    """Raise `UserError` if PyTorch's steps cannot be compared with those of this network."""
    if network.model_name not in MODEL_NAMES:
        raise UserError(f"--torch: there is no {network.model_name} in PyTorch here; choose {', '.join(MODEL_NAMES)}")
    if network.mixed_precision:
        raise UserError("--torch: PyTorch's steps are in float32; leave out --mixed_precision")


def prepare_environment(folder: Path = ENVIRONMENT, requirements: Path = REQUIREMENTS) -> Path:
    """Make the environment unless it is there and up to date; returns its Python.

    Raises:
        UserError: an installation failed.
    """
    python = folder / "bin" / "python"
    stamp, wanted = folder / ".installed", requirements.read_text(encoding="utf-8")
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != wanted:
        print(f"installing PyTorch into {folder} (a few minutes the first time)", flush=True)
        venv.create(folder, clear=True, with_pip=True)
        words = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", str(requirements)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UserError(f"--torch: pip could not install PyTorch: {_last_line(done.stderr)}")
        stamp.write_text(wanted, encoding="utf-8")
    return python


class TorchWorker:
    """A process that runs steps of full training in PyTorch, one at a time. Use as a context manager, which ends it.

    Args:
        network: one that passes `check_network`, with its number of classes.
        python: of the environment.
        compiled: also run the step of `torch.compile`.
        script: what the process runs.

    Attributes:
        variants: names of the steps.
        record: the version of PyTorch, and for each variant that is missing the reason.

    Raises:
        UserError: here and when a step runs: the process ended.
    """

    def __init__(self, network: NetworkSettings, python: Path, compiled: bool = True, script: Path = WORKER) -> None:
        settings = {
            "name": network.model_name,
            "classes": network.num_classes,
            **{key: getattr(network, key) for key in ("input_size", "alpha", "batch_size", "optimizer")},
            "threads": cores(),
            "compiled": compiled,
        }
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # as long as the process
        self._process = subprocess.Popen(
            [python, script, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            bufsize=1,
        )
        self._waiting_ms: list[float] = []
        ready: dict[str, Any] = json.loads(self._answer())
        self.variants: list[str] = ready.pop("variants")
        self.record = ready

    def step(self, variant: str) -> None:
        """Run one step."""
        assert self._process.stdin is not None
        start = time.perf_counter()
        self._process.stdin.write(f"{variant}\n")
        step_ms = float(self._answer())
        self._waiting_ms.append(1e3 * (time.perf_counter() - start) - step_ms)

    @property
    def waiting_ms(self) -> float:
        """By how much `step` usually takes longer than the step itself, as the worker measures it."""
        return float(np.median(self._waiting_ms))

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._errors.seek(0)
            raise UserError(f"--torch: the process that runs PyTorch ended: {_last_line(self._errors.read())}")
        return line

    def __enter__(self) -> TorchWorker:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]
