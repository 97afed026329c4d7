"""The wheel: what is in it, what it requires, and that it trains outside the checkout. Nothing here needs a network."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import elastic_trainer

ROOT = Path(__file__).resolve().parents[1]
TWO_STEPS = """
import elastic_trainer, keras, numpy as np
from elastic_trainer.task import ImageClassification
from elastic_trainer.training.step import TrainStep

keras.utils.set_random_seed(0)
model = keras.Sequential([
    keras.Input((8, 8, 3)),
    keras.layers.Conv2D(4, 3, name="below"),
    keras.layers.BatchNormalization(name="norm"),
    keras.layers.GlobalAveragePooling2D(),
    keras.layers.Dense(3, name="head"),
])
elastic_trainer.freeze_batch_norm(model)
optimizer = keras.optimizers.SGD(0.1)
optimizer.build(model.trainable_variables)
head = {v.path for v in model.get_layer("head").variables}
mask = np.array([v.path in head for v in model.trainable_variables])
step = TrainStep(ImageClassification(model), optimizer, 4, mask)
before = [variable.numpy() for variable in model.variables]
images, labels = np.random.default_rng(0).normal(size=(4, 8, 8, 3)).astype("float32"), np.array([0, 1, 2, 0], "int32")
losses = [step(images, labels)[0] for _ in range(2)]
moved = {v.path for v, old in zip(model.variables, before) if (v.numpy() != old).any()}
assert losses[1] < losses[0], losses
assert moved == head and len(head) == 2, moved
print(elastic_trainer.__file__)
print(elastic_trainer.__version__)
"""


def run(words: list[str], folder: Path, **environment: str) -> str:
    """What a command writes to its standard output, run in `folder` with variables of the environment added."""
    added = {**os.environ, **environment}
    done = subprocess.run(words, cwd=folder, env=added, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files that git knows or would add, so that the build leaves nothing in the checkout."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], ROOT).split("\0"):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def installed(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which a wheel of the checkout was installed, without what it requires."""
    wheels, folder = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--isolated", "--quiet", "--disable-pip-version-check"]  # no settings of pip
    run([*pip, "wheel", "--no-index", "--no-deps", "--no-build-isolation", "-w", str(wheels), str(checkout)], wheels)
    [wheel] = wheels.iterdir()
    run([*pip, "install", "--no-index", "--no-deps", "--no-compile", "--target", str(folder), str(wheel)], wheels)
    return folder


@pytest.fixture(scope="module")
def distribution(installed: Path) -> metadata.Distribution:
    [found] = metadata.distributions(name="elastic-trainer", path=[str(installed)])
    return found


def test_the_wheel_has_the_package_and_the_solver_and_nothing_else(checkout: Path, installed: Path) -> None:
    files = {path.relative_to(installed).as_posix() for path in installed.rglob("*") if path.is_file()}
    package = {path.relative_to(checkout).as_posix() for path in (checkout / "elastic_trainer").rglob("*.py")}
    assert len(package) > 50
    app = "elastic_trainer/extensions/fleet/app/pyproject.toml"
    expected = {*package, app, "elastic_trainer/py.typed", "selection_solver_DP.py"}
    assert {name for name in files if ".dist-info/" not in name} == expected


def test_the_installed_package_trains_two_steps_outside_the_checkout(
    installed: Path, distribution: metadata.Distribution, tmp_path: Path
) -> None:
    written = run([sys.executable, "-c", TWO_STEPS], tmp_path, PYTHONPATH=str(installed))
    assert written.split("\n")[-3:-1] == [str(installed / "elastic_trainer" / "__init__.py"), distribution.version]


def listed(name: str) -> set[Requirement]:
    """The requirements of a file, without those of the files that it includes."""
    lines = (line.partition("#")[0].strip() for line in (ROOT / name).read_text(encoding="utf-8").splitlines())
    return {Requirement(line) for line in lines if line and not line.startswith("-r ")}


@pytest.mark.parametrize(("extra", "name"), [("", "requirements.txt"), ("dev", "requirements-dev.txt")])
def test_the_wheel_requires_what_the_requirements_say(
    distribution: metadata.Distribution, extra: str, name: str
) -> None:
    found = set()
    for requirement in map(Requirement, distribution.requires or []):
        marker = str(requirement.marker or "")
        requirement.marker = None
        if marker == (f'extra == "{extra}"' if extra else ""):
            found.add(requirement)
    assert found == listed(name) != set()


def test_the_wheel_says_what_it_is(distribution: metadata.Distribution) -> None:
    about = distribution.metadata
    assert set(about.get_all("Provides-Extra") or []) == {"dev"}
    assert about["License-Expression"] == "MIT"
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"name: {about['Author']}\n" in citation
    pythons = SpecifierSet(about["Requires-Python"])
    assert [minor for minor in range(30) if f"3.{minor}" in pythons] == [10, 11, 12, 13]
    assert "Python 3.10 to 3.13" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_a_checkout_that_is_not_installed_has_the_version_of_the_wheel(distribution: metadata.Distribution) -> None:
    [fallback] = re.findall(r'__version__ = "(.*)"', Path(elastic_trainer.__file__).read_text(encoding="utf-8"))
    assert fallback == distribution.version


# --- the public names -------------------------------------------------------------------------------------------------


def test_type_checkers_see_the_names_that_are_imported_when_they_are_used() -> None:
    tree = ast.parse(Path(elastic_trainer.__file__).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    seen = {name.name: node.module for node in imports for name in node.names}
    assert elastic_trainer._MODULES.items() <= seen.items()
    assert set(elastic_trainer.__all__) == {"__version__", *elastic_trainer._MODULES}


@pytest.mark.parametrize("name", elastic_trainer.__all__)
def test_each_public_name_exists_and_is_listed(name: str) -> None:
    assert getattr(elastic_trainer, name) is not None
    assert name in dir(elastic_trainer)


def test_another_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match=r"elastic_trainer.*no_such_name"):
        _ = elastic_trainer.no_such_name  # type: ignore[attr-defined]
    assert not hasattr(elastic_trainer, "no_such_name")
