"""This machine: hardware and versions, memory, and TensorFlow on it.

Results record the environment, because times depend on it. Importing this file does not import TensorFlow.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from elastic_trainer.system.errors import UserError
from elastic_trainer.system.memory import text_of

CPU_INFO = Path("/proc/cpuinfo")
PACKAGES = ("tensorflow", "keras", "numpy", "vit-keras", "tensorflow-datasets", "scikit-learn")
THREAD_VARIABLES = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS")  # TensorFlow reads them


def seconds_since_start(root: Path = Path("/")) -> float | None:
    """Wall seconds since this process started, to a hundredth; None if the system does not report it."""
    fields, uptime = text_of(root / "proc" / "self" / "stat").rpartition(")")[2].split(), text_of(root / "proc/uptime")
    if len(fields) < 20 or not uptime:
        return None
    return float(uptime.split()[0]) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def environment() -> dict[str, Any]:
    """Versions, hardware and limits on threads, which are part of every record of a result."""
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "commit": _commit(),
        "python": platform.python_version(),
        "packages": versions,
        "machine": platform.machine(),
        "processor": _processor_name(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "thread_settings": {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ},
        "system": platform.system(),
    }


@functools.cache
def _commit(file: Path = Path(__file__)) -> str | None:
    """Commit of the checkout that contains `file`, with "-dirty" if files have changed; None outside a checkout."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(file.parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    with contextlib.suppress(OSError, subprocess.SubprocessError):
        git("ls-files", "--error-unmatch", file.name)  # fails if it is installed in the checkout of another project
        return git("describe", "--always", "--dirty", "--exclude=*")
    return None


def _processor_name() -> str:
    lines = text_of(CPU_INFO).splitlines()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    # x86 writes "model name", boards write "Model" or "Hardware".
    return next((fields[key] for key in ("model name", "Model", "Hardware") if key in fields), platform.processor())


@contextlib.contextmanager
def frozen_gc() -> Iterator[None]:
    """Garbage collections in this block skip objects that exist already, such as TensorFlow's and Keras' modules.

    Collecting the graph of an earlier step then takes a tenth of the time (0.24 s before, on the reference machine).
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def release_memory() -> None:
    """Collect garbage, and return freed memory to the system where the C library (glibc) can do that."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def has_gpu() -> bool:
    """Whether TensorFlow trains on a GPU, which has its own memory."""
    import tensorflow as tf

    return bool(tf.config.list_physical_devices("GPU"))


def gpu_peak_memory_mb() -> float | None:
    """Peak memory of TensorFlow's allocators on all GPUs so far in MB, or None without a GPU."""
    import tensorflow as tf

    gpus = tf.config.list_logical_devices("GPU")
    return sum(tf.config.experimental.get_memory_info(gpu.name)["peak"] for gpu in gpus) / 1e6 if gpus else None


def load_tensorflow() -> None:
    """Import TensorFlow without its log messages, which would hide the messages of the commands, and Keras on it.

    TensorFlow 2.21 writes some lines to file descriptor 2 before it reads TF_CPP_MIN_LOG_LEVEL. Set that variable to
    see everything. Another backend of Keras, in KERAS_BACKEND or keras.json, does not apply to this process and those
    that it starts.
    """
    os.environ["KERAS_BACKEND"] = "tensorflow"
    _check_home()
    if "TF_CPP_MIN_LOG_LEVEL" in os.environ:
        return
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    with silenced():
        import keras  # noqa: F401
        import tensorflow

        tensorflow.config.list_physical_devices()  # a missing GPU driver is reported here, not at import
    del os.environ["TF_CPP_MIN_LOG_LEVEL"]  # it has been read; child processes set it again


def check_keras() -> None:
    """Import Keras. Raises `UserError` if it does not compute in TensorFlow."""
    _check_home()
    import keras

    if keras.config.backend() != "tensorflow":
        raise UserError(
            f"Keras computes in {keras.config.backend()}, and elastic_trainer needs TensorFlow: set "
            "KERAS_BACKEND=tensorflow in the environment before Keras is imported"
        )


def _check_home() -> None:
    """Where the user has no home folder, as in some containers, packages keep their files in a temporary one."""
    try:
        Path.home()
    except RuntimeError:
        os.environ["HOME"] = tempfile.mkdtemp(prefix="home")
        print(f"no home folder: downloads and caches go to {os.environ['HOME']}; HOME sets another", file=sys.stderr)


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Discard what this block and C++ libraries in it write to standard error; exceptions pass as usual."""
    sys.stderr.flush()
    saved = os.dup(2)
    try:
        with Path(os.devnull).open("wb") as null:
            os.dup2(null.fileno(), 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(saved, 2)
        os.close(saved)
