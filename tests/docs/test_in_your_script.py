"""The programs of docs/in_your_script.md run in any folder, learn, and use public names only."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest

import elastic_trainer

PAGE = Path(__file__).resolve().parents[2] / "docs" / "in_your_script.md"


def programs() -> dict[str, str]:
    """The complete programs of the page: those that import `elastic_trainer`, by the heading above each."""
    found, heading = dict[str, str](), ""
    text = PAGE.read_text(encoding="utf-8")
    for match in re.finditer(r"^#+ (?P<heading>[^\n]+)$|^```\w*\n(?P<code>.*?)^```$", text, re.DOTALL | re.MULTILINE):
        heading = match["heading"] or heading
        if "from elastic_trainer import" in (match["code"] or ""):
            found[heading] = match["code"]
    return found


PROGRAMS = programs()
IN_FIT = [name for name, code in PROGRAMS.items() if "ElasticTraining" in code]


def test_the_page_has_two_programs_with_fit_and_one_with_the_loop() -> None:
    assert len(IN_FIT) == 2 and len(PROGRAMS) == 3
    assert len(PAGE.read_text(encoding="utf-8").splitlines()) <= 200


@pytest.mark.parametrize("name", IN_FIT)
def test_a_program_this_short_trains_as_plain_fit_and_says_so(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    two_epochs = re.sub(r"\b(epochs|decay_steps)=6\b", r"\1=2", PROGRAMS[name])
    exec(compile(two_epochs, name, "exec"), {"__name__": "__main__"})
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
