"""The programs of docs/in_your_script.md run in any folder, learn, and use public names only."""

from __future__ import annotations

import argparse
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


@pytest.mark.parametrize("name", IN_FIT)
def test_a_program_this_short_trains_as_plain_fit_and_says_so(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(benchmark_examples.with_epochs(PROGRAMS[name], 2), name, "exec"), {"__name__": "__main__"})
    lines = re.findall(r"^ElasticTraining: (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert "plain fit" in lines[-1] or "as without" in lines[-1], lines


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.usefixtures("quick_profiles")
def test_a_program_learns_and_says_how_many_tensors_train(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "epochs=6" in PROGRAMS[name]
    scheme = "elastic_training_upper_part" if name == "Photos" else "elastic_training"
    shorter = PROGRAMS[name].replace("epochs=6", "epochs=4")  # one after the second selection
    shorter = re.sub(r"ElasticTraining\(rho=[\d.]+", rf"\g<0>, interval=3, scheme='{scheme}'", shorter)
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

keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64), keras.layers.Dense(1)])
rate = keras.optimizers.schedules.CosineDecay(1e-5, decay_steps=6 * 2)
model.compile(keras.optimizers.SGD(rate), "mse")
stop = keras.callbacks.EarlyStopping(patience=3)
model.fit(np.ones((64, 64)), np.ones(64), epochs=6, callbacks=[ElasticTraining(rho=1), stop], verbose=0)
"""


def test_the_benchmark_times_a_program_of_any_length_in_both_ways() -> None:
    code = benchmark_examples.with_epochs(TINY, 3)
    assert "decay_steps=3 * 2" in code and "patience=3" in code and "epochs=3" in code
    pair = {way: benchmark_examples.run(code, way) for way in benchmark_examples.WAYS}
    for found in pair.values():
        assert len(found["epochs"]) == 3 and found["seconds"] >= sum(row["seconds"] for row in found["epochs"]) > 0
    assert not pair["plain"]["lines"] and pair["elastic"]["lines"]
    summary = benchmark_examples.summary([pair])
    assert summary["plain"]["loss"] == pair["plain"]["epochs"][-1]["loss"] == summary["elastic"]["loss"]
    assert summary["ratio"] == pair["elastic"]["seconds"] / pair["plain"]["seconds"]


def test_the_benchmark_goes_on_from_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []

    def made_up(code: str, way: str) -> dict[str, object]:
        runs.append(way)
        return {
            "seconds": 9.0,
            "lines": [],
            "epochs": [{"seconds": 5.0, "loss": 2.0}, *[{"seconds": 2.0, "loss": 1.0}] * 2],
        }

    monkeypatch.setattr(benchmark_examples, "run", made_up)
    args = argparse.Namespace(rounds=1, minutes=[0.55], record=tmp_path / "pays.json", photos=None, only="Photos")
    record = benchmark_examples.measure(args)
    assert runs == ["plain", "plain", "elastic"]
    assert record["examples"]["Photos, 0.55 min"]["epochs"] == 15, "of 2 s each, after 5 s at the start"
    args.rounds = 2
    benchmark_examples.measure(args)
    assert runs[3:] == ["elastic", "plain"], "the ways alternate"
