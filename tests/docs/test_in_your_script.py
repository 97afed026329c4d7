"""The programs of docs/in_your_script.md run in any folder, learn, and use public names only."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import benchmark_examples
import pytest
from benchmark_examples import PAGE, programs

import elastic_trainer

PROGRAMS = programs()
IN_FIT = [name for name, code in PROGRAMS.items() if "ElasticTraining" in code]


def test_the_page_has_three_programs_with_fit_and_one_with_the_loop() -> None:
    assert len(IN_FIT) == 3 and len(PROGRAMS) == 4
    assert len(PAGE.read_text(encoding="utf-8").splitlines()) <= 200


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.usefixtures("quick_profiles")
def test_a_program_learns_and_says_how_many_tensors_train(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "epochs=6" in PROGRAMS[name]
    shorter = PROGRAMS[name].replace("epochs=6", "epochs=4")  # one after the second selection
    (tmp_path / "program.py").write_text(shorter, encoding="utf-8")
    runpy.run_path(str(tmp_path / "program.py"), run_name="__main__")
    output = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"(?<!\w)loss: ([\d.e+-]+)", output)]
    assert len(losses) >= 3 and losses[-1] < losses[0], output
    counts = [(int(some), int(of)) for some, of in re.findall(r"(\d+) of (\d+) tensors train", output)]
    assert len(counts) >= 1 + (name in IN_FIT) and all(0 < some <= of for some, of in counts), output
    if name in IN_FIT:  # all tensors may fit, where plain `fit` is slow
        shares = [float(share) for share in re.findall(r"tensors train, predicted ([\d.]+) of", output)]
        [asked] = re.findall(r"ElasticTraining\(rho=([\d.]+)", PROGRAMS[name])
        assert shares and shares[0] <= float(asked), output
        assert len(list(tmp_path.glob("elastic_trainer/*/profile.json"))) == 1, "the table is kept for the next run"


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_uses_public_names_only(name: str) -> None:
    tree = ast.parse(PROGRAMS[name])
    plain = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert set(plain) <= {"keras", "numpy", "tensorflow"}
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert {node.module for node in froms} <= {"keras", "elastic_trainer"}
    ours = {alias.name for node in froms if node.module == "elastic_trainer" for alias in node.names}
    assert ours and ours <= set(elastic_trainer.__all__)
    private = [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr.startswith("_")]
    assert not private


TINY = """
import keras, numpy as np
from elastic_trainer import ElasticTraining

model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(1e-5), "mse")
model.fit(np.ones((64, 64)), np.ones(64), epochs=3, callbacks=[ElasticTraining(rho=1)], verbose=0)
"""


def test_the_benchmark_times_a_program_in_another_folder_as_it_is_and_with_plain_fit() -> None:
    runs = {way: benchmark_examples.run(TINY, way) for way in benchmark_examples.WAYS}
    for epochs, _ in runs.values():
        assert len(epochs) == 3 and all(seconds >= steps > 0 for seconds, steps, _ in epochs)
    assert runs["plain"][1] == 0 < runs["elastic"][1], "plain fit measures no timing table"
    assert benchmark_examples.summary([runs["plain"]])["loss"] == runs["plain"][0][-1][2]
