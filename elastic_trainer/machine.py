"""This machine: what it is, what memory it has left, and whether others take its time. No TensorFlow at load time."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("tensorflow", "keras", "numpy", "vit-keras", "tensorflow-datasets", "scikit-learn")
THREAD_VARIABLES = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS")  # what TensorFlow heeds
DISTURBED_SHARE = 0.02  # of all processors' time while a call is measured; the kernel counts it in steps of 10 ms


def is_undisturbed(seconds: float, stolen: float) -> bool:
    """Whether other virtual machines took next to nothing: `stolen` seconds of processor time within `seconds`."""
    return stolen <= DISTURBED_SHARE * seconds * (os.cpu_count() or 1)


def stolen_seconds(root: Path = Path("/")) -> float:
    """Processor time since the start that this virtual machine wanted and others got; 0 where nobody tells."""
    # cpu, user, nice, system, idle, iowait, irq, softirq, steal
    fields = text_of(root / "proc" / "stat").partition("\n")[0].split()
    return int(fields[8]) / os.sysconf("SC_CLK_TCK") if len(fields) > 8 else 0.0


def environment() -> dict[str, Any]:
    """Versions, hardware and bounds on threads that a figure depends on."""
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "python": platform.python_version(),
        "packages": versions,
        "machine": platform.machine(),
        "processor": _processor_name(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "thread_settings": {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ},
        "system": platform.system(),
    }


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    # x86 says "model name", boards say "Model" or "Hardware".
    return next((fields[key] for key in ("model name", "Model", "Hardware") if key in fields), platform.processor())


def has_bfloat16() -> bool:
    """Whether the CPU has instructions for bfloat16, as far as the system tells."""
    with contextlib.suppress(OSError):
        words = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split()
        return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(words)  # the last is Arm's name
    return False


def text_of(path: Path) -> str:
    """A file of the kernel's, or nothing if it is not there."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def peak_memory_mb() -> float | None:
    """Largest resident memory of this process so far in MB, or None where the system does not tell."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6


def gpu_peak_memory_mb() -> float | None:
    """Most that TensorFlow's allocators held on all GPUs so far in MB, or None without a GPU."""
    import tensorflow as tf

    gpus = tf.config.list_logical_devices("GPU")
    return sum(tf.config.experimental.get_memory_info(gpu.name)["peak"] for gpu in gpus) / 1e6 if gpus else None


def available_memory_mb(root: Path = Path("/")) -> float | None:
    """Memory in MB that this process can still get, swap included, or None where the system does not tell.

    That is what Linux calls available, or what the control groups that hold this process (of a container, a service)
    leave below their limits, if that is less. What a group keeps of files counts as free: it is dropped when needed.

    Args:
        root: the folder that holds proc and sys.
    """
    system = _numbers_in(root / "proc" / "meminfo")  # in KiB
    if "MemAvailable:" not in system:
        return None
    swap = 1024 * system.get("SwapFree:", 0)
    room = 1024 * system["MemAvailable:"] + swap
    for group in _memory_groups(root):
        for limit, usage, kept in (
            ("memory.max", "memory.current", ("inactive_file", "active_file")),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
        ):
            largest, used = _whole_number_in(group / limit), _whole_number_in(group / usage)
            if largest is not None and used is not None:
                counts = _numbers_in(group / "memory.stat")
                room = min(room, largest - used + sum(counts.get(name, 0) for name in kept) + swap)
    return max(room, 0) / 1e6


def _memory_groups(root: Path) -> Iterator[Path]:
    """Folders of the control groups that bound this process's memory, each with those around it."""
    base = root / "sys" / "fs" / "cgroup"
    for line in text_of(root / "proc" / "self" / "cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" or "memory" in controllers.split(","):
            top = base if number == "0" else base / "memory"
            parts = [part for part in path.split("/") if part not in ("", "..")]
            # A container may see its own group as the top one, whatever the path says.
            yield from (top.joinpath(*parts[:depth]) for depth in range(len(parts) + 1))


def _numbers_in(path: Path) -> dict[str, int]:
    """The lines `name number …` of a file of the kernel's."""
    lines = [line.split() for line in text_of(path).splitlines()]
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def _whole_number_in(path: Path) -> int | None:
    """The one number in a file of the kernel's; None if it is not there or says `max`."""
    text = text_of(path).strip()
    return int(text) if text.isdigit() else None


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
