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
from environments import make_environment, needed
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import elastic_trainer
from elastic_trainer.system.errors import EXTRAS

ROOT = Path(__file__).resolve().parents[1]
LIGHT = """
import importlib, pkgutil
from functools import partial
from pathlib import Path
import keras, numpy as np
import elastic_trainer
from elastic_trainer.datasets.images import ImageFiles, read
from elastic_trainer.datasets.named import find
from elastic_trainer.evaluation.export import Interpreter
from elastic_trainer.networks.tflite import convert
from elastic_trainer.evaluation.pictures import draw_confusion
from elastic_trainer.networks.architectures import build_backbone
from elastic_trainer.settings import Settings

modules = [module.name for module in pkgutil.walk_packages(elastic_trainer.__path__, "elastic_trainer.")]
for attempt in (
    *(partial(importlib.import_module, name) for name in modules),
    lambda: find(Settings(dataset_name="digits", augment="none")),
    lambda: find(Settings(dataset_name="stanford_dogs", data_dir=Path("."), augment="none")),
    lambda: read([ImageFiles(1, lambda: [("photo.jpg", 0)])], 8, Path(".")),
    lambda: build_backbone("vit", 32, "imagenet", 1.0),
    lambda: draw_confusion(np.eye(2), ["a", "b"]),
):
    try:
        attempt()
    except elastic_trainer.UserError as error:
        print(error)

keras.utils.set_random_seed(0)
convolutions = [keras.layers.Conv2D(32, 3, padding="same", activation="relu") for _ in range(4)]
layers = [keras.Input((32, 32, 3)), *convolutions, keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(3)]
model = keras.Sequential(layers)
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
images, labels = np.random.default_rng(0).normal(size=(64, 32, 32, 3)).astype("float32"), np.arange(64) % 3
before = [variable.numpy() for variable in model.trainable_variables]
elastic = elastic_trainer.ElasticTraining(0.8, scheme="elastic_training_upper_part", verbose=0)
model.fit(images, labels, 8, epochs=2, callbacks=[elastic], verbose=0)
moved = [(variable.numpy() != old).any() for variable, old in zip(model.trainable_variables, before)]
assert any(moved) and moved == elastic.history.selection.mask.tolist(), moved
logits = Interpreter(*convert(model, False))(images[0])
assert np.allclose(logits, model(images[:1])[0], atol=1e-4), logits
print(elastic_trainer.__file__, elastic_trainer.__version__)
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
    data = {"elastic_trainer/py.typed", "elastic_trainer/board/tensorflow_2.6_operations.txt"}
    expected = {*package, *data, "selection_solver_DP.py"}
    assert {name for name in files if ".dist-info/" not in name} == expected


def listed(name: str) -> set[Requirement]:
    """The requirements of a file, without those of the files that it includes."""
    lines = (line.partition("#")[0].strip() for line in (ROOT / name).read_text(encoding="utf-8").splitlines())
    return {Requirement(line) for line in lines if line and not line.startswith("-r ")}


def required(distribution: metadata.Distribution, extra: str) -> set[Requirement]:
    """What the wheel requires for an extra; "" for what it always requires."""
    found = set()
    for requirement in map(Requirement, distribution.requires or []):
        own, _, name = str(requirement.marker or "").rpartition("extra == ")
        if name.strip('"') == extra:
            requirement.marker = Marker(own.removesuffix(" and ")) if own else None
            found.add(requirement)
    return found


def test_the_wheel_requires_what_the_requirements_say(distribution: metadata.Distribution) -> None:
    extras = {name: required(distribution, name) for name in ("data", "vit", "plots")}
    assert all(extras.values())
    assert required(distribution, "").union(*extras.values()) == listed("requirements.txt")
    assert required(distribution, "all") == {Requirement("elastic-trainer[data,vit,plots]")}
    assert required(distribution, "dev") == listed("requirements-dev.txt") | {Requirement("elastic-trainer[all]")}
    for extra, found in extras.items():
        names = {package for package, name in EXTRAS.values() if name == extra}
        assert {each.name for each in found} - {"tensorboard-plugin-profile"} == names


def test_what_the_wheel_always_requires_suffices_to_train_and_to_export(
    installed: Path, distribution: metadata.Distribution, tmp_path: Path
) -> None:
    always = needed(str(requirement) for requirement in required(distribution, ""))
    python = make_environment(tmp_path / "light", always)
    written = run([str(python), "-c", LIGHT], tmp_path, PYTHONPATH=str(installed))
    expected = {
        ("reading images", "pillow", "data"),
        ("--dataset_name digits", "scikit-learn", "data"),
        ("--dataset_name stanford_dogs", "tensorflow-datasets", "data"),
        ("--model_name vit", "vit-keras", "vit"),
        ("drawing a confusion matrix", "matplotlib", "plots"),
        ("TensorBoard's events", "tensorboard", "plots"),
    }
    *lines, origin = written.splitlines()
    assert origin == f"{installed / 'elastic_trainer' / '__init__.py'} {distribution.version}"
    assert {line.partition(" && ")[0] for line in lines} == {
        f'{what}: needs {package}; pip install "elastic-trainer[{extra}]"'
        for what, package, extra in expected
        if package not in {each.name for each in always}  # TensorFlow needed TensorBoard before 2.21
    }
    words = [str(python), str(ROOT / "data.py"), "prepare", "--dataset_name", "stanford_dogs"]
    command = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "data.py: error: " in command.stderr and "Traceback" not in command.stderr


def test_the_wheel_says_what_it_is(distribution: metadata.Distribution) -> None:
    about = distribution.metadata
    assert set(about.get_all("Provides-Extra") or []) == {"all", "data", "dev", "plots", "vit"}
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
