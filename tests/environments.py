"""Environments of a few packages of the one that runs the tests; they need no network."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement


def make_environment(folder: Path, packages: Iterable[metadata.Distribution]) -> Path:
    """Python of a new environment in `folder` that has links to the files of these packages, and nothing else."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    [place] = folder.glob("lib/python*/site-packages")
    for package in packages:
        for file in package.files or []:
            if ".." not in file.parts and "__pycache__" not in file.parts:
                (place / file).parent.mkdir(parents=True, exist_ok=True)
                (place / file).symlink_to(file.locate())
    return folder / "bin" / "python"


def needed(requirements: Iterable[str]) -> list[metadata.Distribution]:
    """The packages that pip would install for these requirements, of those that are here."""
    found: dict[str, metadata.Distribution] = {}
    rest = [*requirements]
    while rest:
        requirement = Requirement(rest.pop())
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            package = metadata.distribution(requirement.name)
            if package.name not in found:
                found[package.name] = package
                rest += package.requires or []
    return [*found.values()]
