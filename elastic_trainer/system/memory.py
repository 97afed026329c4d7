"""Memory of the machine and of this process, by the files of the kernel.

A board gets a copy of this file (`board.export`), so it imports nothing but Python's own modules, from 3.6 on.
"""

import resource
import sys
from pathlib import Path
from typing import Dict, Iterator, Optional


def text_of(path: Path) -> str:
    """The text of a kernel file, or "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def peak_memory_mb() -> float:
    """Largest resident memory of this process so far in MB."""
    kilobytes = numbers_in(Path("/proc/self/status")).get("VmHWM:")
    if kilobytes is not None:  # Linux lets a program inherit the other number from the one that started it
        return kilobytes * 1024 / 1e6
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6


def resident_memory_mb() -> Optional[float]:
    """Resident memory of this process now in MB, or None if the system does not report it."""
    kilobytes = numbers_in(Path("/proc/self/status")).get("VmRSS:")
    return None if kilobytes is None else kilobytes * 1024 / 1e6


def free_memory_mb(root: Path = Path("/"), counts_swap: bool = True) -> Optional[float]:
    """Memory in MB that the system and control groups leave, or None if the system does not report it.

    Control groups are those of a container or a service. Their file cache counts as free: the kernel drops it when
    needed. `root` contains proc and sys.
    """
    system = numbers_in(root / "proc" / "meminfo")  # in KiB
    if "MemAvailable:" not in system:
        return None
    swap = 1024 * system.get("SwapFree:", 0) if counts_swap else 0
    available = 1024 * system["MemAvailable:"] + swap
    for group in _memory_groups(root):
        for limit, usage, cache in (
            ("memory.max", "memory.current", ("inactive_file", "active_file")),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
        ):
            largest, used = _integer_in(group / limit), _integer_in(group / usage)
            if largest is not None and used is not None:
                counts = numbers_in(group / "memory.stat")
                free = largest - used + sum(counts.get(name, 0) for name in cache) + swap
                available = min(available, free)
    return max(available, 0) / 1e6


def _memory_groups(root: Path) -> Iterator[Path]:
    """Folders of the control groups that limit this process's memory, each with its parent groups."""
    base = root / "sys" / "fs" / "cgroup"
    for line in text_of(root / "proc" / "self" / "cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" or "memory" in controllers.split(","):
            top = base if number == "0" else base / "memory"
            parts = [part for part in path.split("/") if part not in ("", "..")]
            # Inside a container, its group may be the top one although the path is longer.
            yield from (top.joinpath(*parts[:depth]) for depth in range(len(parts) + 1))


def numbers_in(path: Path) -> Dict[str, int]:
    """The lines `name number …` of a kernel file, as {name: number}."""
    lines = [line.split() for line in text_of(path).splitlines()]
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def _integer_in(path: Path) -> Optional[int]:
    """The only number in a kernel file; None if the file is missing or contains `max`."""
    text = text_of(path).strip()
    return int(text) if text.isdigit() else None
