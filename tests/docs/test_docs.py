"""README and docs agree with the commands and the files: flags and their defaults, links, shown commands, the tree."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import flags_page
import pytest
from resolutions import PREFIX

from elastic_trainer.selection.named import SCHEMES

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
LOG = sorted((DOCS / "log").glob("*.md"))
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *(ROOT / name / "README.md" for name in ("figures", "logs", "weights")),
    *sorted(DOCS.glob("*.md")),
    *LOG,
]
COMMANDS = (
    ("main.py",),
    ("profiler.py",),
    ("data.py",),
    ("scripts/figures/run_figure.py",),
)
Words = tuple[str, ...]


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


FENCED = re.compile(r"^```\w*\n(.*?)^```", re.DOTALL | re.MULTILINE)


@functools.cache
def flags_of(command: Words) -> set[str]:
    """The flags of a command, by its own --help."""
    out, wide = io.StringIO(), {"COLUMNS": "1000", "NO_COLOR": "1"}  # one line for each text
    with (
        mock.patch.dict(os.environ, wide),
        mock.patch("sys.argv", [*command, "--help"]),
        contextlib.redirect_stdout(out),
        pytest.raises(SystemExit),
    ):
        runpy.run_path(str(ROOT / command[0]), run_name="__main__")
    return {*re.findall(r"^  (--\w+)", out.getvalue(), re.MULTILINE)}


# --- flags.md ---------------------------------------------------------------------------------------------------------


def documented(command: Words) -> set[str]:
    """The flags in the tables under the headings of a command, as the pages have them."""
    found: list[str] = []
    heading, is_of_flags = "", False
    headings = {command[0], "profiler.py and main.py"} if command[0] in ("main.py", "profiler.py") else {command[0]}
    pages = ("flags.md", "offline.md", "paper_figures.md")
    for line in "\n".join((DOCS / page).read_text(encoding="utf-8") for page in pages).splitlines():
        heading = line.removeprefix("## ") if line.startswith("## ") else heading
        is_of_flags = line.startswith("|") and (is_of_flags or line.startswith("| flag |"))
        if heading in headings and is_of_flags:
            found += re.findall(r"--\w+", line.split("|")[1])
    assert len(found) == len({*found}), f"flags.md lists a flag of {command[0]} twice"
    return {*found}


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_flags_page_lists_exactly_the_flags_of_each_command(command: Words) -> None:
    assert "--data_dir" in flags_of(command)
    assert documented(command) == flags_of(command)


def test_flags_page_is_what_its_script_writes() -> None:
    """After a change of settings.py or of a scheme: python scripts/tools/flags_page.py."""
    pages = [page.read_text(encoding="utf-8") for page in flags_page.PAGES]
    assert "".join(pages).count("<!-- end -->") == "".join(pages).count("<!-- flags: ") + 2
    with mock.patch.dict(SCHEMES):
        for name in [name for name in SCHEMES if name.startswith(PREFIX)]:
            del SCHEMES[name]
        assert [*map(flags_page.updated, pages)] == pages


def test_flags_page_names_no_flag_that_no_command_has() -> None:
    text = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    known = {"--help"}.union(*(flags_of(command) for command in COMMANDS))
    assert set(re.findall(r"--[a-z]\w*", text)) <= known


# --- links ------------------------------------------------------------------------------------------------------------


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", FENCED.sub("", text))


def anchors(page: Path) -> set[str]:
    """The anchors that code hosts, and the site, give to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> list[str]:
    found = re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8")))
    return [link for link in found if not re.match(r"[a-z]+:", link)]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_relative_link_has_a_target(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target), link
        if DOCS in page.parents:  # the site holds nothing else
            assert DOCS in target.resolve().parents, link


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_path_in_code_font_exists(page: Path) -> None:
    """The pages of the site name files outside docs/ in code font."""
    prose = FENCED.sub("", page.read_text(encoding="utf-8"))
    for path in re.findall(r"`((?:docs|elastic_trainer|scripts|tests|weights)/[\w./]+)`", prose):
        assert (ROOT / path).exists(), path


def test_the_pages_link_to_each_other() -> None:
    assert sum(len(links(page)) for page in PAGES) > 50
    pages = set(DOCS.glob("*.md")) - {DOCS / "index.md"}
    for start, expected in ((ROOT / "README.md", pages), (DOCS / "index.md", pages), (DOCS / "log.md", set(LOG))):
        linked = {(start.parent / link.partition("#")[0]).resolve() for link in links(start)}
        missing = expected - linked
        assert not missing, f"{page_id(start)} does not link to {sorted(map(page_id, missing))}"


def words(page: Path) -> int:
    """Words of a page, tables included: what stands between spaces and has a letter or a digit."""
    return len(re.findall(r"\S*\w\S*", page.read_text(encoding="utf-8")))


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=page_id)
def test_a_page_has_at_most_1000_words(page: Path) -> None:
    assert words(page) <= 1_000


def test_all_pages_have_at_most_30000_words() -> None:
    pages = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")] + [*DOCS.rglob("*.md")]
    assert sum(map(words, pages)) <= 30_000


@pytest.mark.parametrize("page", LOG, ids=page_id)
def test_a_page_of_the_log_says_when_it_was_measured(page: Path) -> None:
    assert re.search(r"^\*.*\b\d{1,2} [A-Z][a-z]+ \d{4}\b", page.read_text(encoding="utf-8"), re.MULTILINE)


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "flags" / "index.html").is_file()
    assert (tmp_path / "site" / "demo.png").is_file() and (tmp_path / "site/results/budget_grocery.png").is_file()


# --- commands ---------------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """A command in a page: the script, and what it is given."""

    script: str
    words: list[str]

    @property
    def flags(self) -> list[str]:
        return [word.partition("=")[0] for word in self.words if re.match(r"--\w", word)]


def shown_calls(page: Path) -> list[Call]:
    """The calls of this project's scripts in the fenced blocks of a page; shell variables are replaced."""
    calls = []
    for block in FENCED.findall(page.read_text(encoding="utf-8")):
        variables: dict[str, str] = {}
        for shown in block.replace("\\\n", " ").splitlines():
            line = shown
            if assigned := re.fullmatch(r'(\w+)="(.*)"', line):
                variables[assigned[1]] = assigned[2]
            for name, value in variables.items():
                line = line.replace(f"${name}", value)
            if re.search(r"python3? (\w+|scripts/\S+)\.py\b|^(\$ )?(\./)?scripts/\S+\.sh\b", line):
                words = shlex.split(line, comments=True)
                at = next(k for k, word in enumerate(words) if re.search(r"\.(py|sh)$", word))
                end = next((k for k, word in enumerate(words) if word in ("&&", "|", ";", ">")), len(words))
                script = words[at].removeprefix("./").replace("board_train.py", "scripts/board/board_train.py")
                calls.append(Call(script, words[at + 1 : end]))
    return calls


def unknown_flags(call: Call) -> set[str]:
    """Flags of a shown call that its script does not have."""
    if call.script.endswith(".py") and not call.script.startswith("scripts/board"):  # that one needs an export
        return set(call.flags) - flags_of((call.script,)) if call.flags else set()
    at = call.words.index("--") if "--" in call.words else len(call.words)
    own, passed_on = Call(call.script, call.words[:at]), Call("main.py", call.words[at + 1 :])
    is_figure = re.match(r"scripts/run_(figure|table)\w+\.sh", call.script)
    source = (ROOT / call.script).read_text(encoding="utf-8")
    known = flags_of(("scripts/figures/run_figure.py",)) if is_figure else re.findall(r"--\w+", source)
    return {*own.flags}.difference(known) | unknown_flags(passed_on)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_shown_command_names_a_script_and_flags_that_exist(page: Path) -> None:
    for call in shown_calls(page):
        assert (ROOT / call.script).is_file(), call
        assert not unknown_flags(call), call


def test_commands_are_found_in_the_pages() -> None:
    scripts = [call.script for page in PAGES for call in shown_calls(page)]
    assert len(scripts) > 40
    assert {"main.py", "profiler.py", "data.py", "scripts/run_demo.sh", "scripts/run_figure15.sh"} <= set(scripts)
    assert any("--deadline" in call.flags for call in shown_calls(ROOT / "README.md"))


# --- the tree ---------------------------------------------------------------------------------------------------------


def rooms(folder: str) -> list[str]:
    """Names of the folders with modules in `folder`."""
    return sorted({path.parent.name for path in (ROOT / folder).glob("*/*.py")})


def test_the_readme_has_at_most_150_lines() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_the_readme_names_every_top_level_module_and_every_room() -> None:
    blocks = FENCED.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    [tree] = [block for block in blocks if block.startswith("main.py")]
    entries = {line.split()[0] for line in tree.splitlines() if not line.strip().startswith("#")}
    expected = {path.name for path in [*ROOT.glob("*.py"), *(ROOT / "elastic_trainer").glob("*.py")]} - {"__init__.py"}
    expected |= {f"{room}/" for room in [*rooms("elastic_trainer"), *rooms("scripts")]}
    assert len(expected) > 15
    assert expected <= entries
    gone = {entry for entry in entries - expected if not (ROOT / entry).is_dir()}
    assert not gone, "the tree names what is not there"


def test_the_first_screen_of_the_readme_is_the_papers() -> None:
    """Its picture, its commands, then where the method is; everything else comes later."""
    first_screen = "\n".join((ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:45])
    order = ("docs/results/paper/", "profiler.py --model_name resnet50", "run_figure15ad.sh", "Tensor Selector")
    assert sorted(order, key=first_screen.index) == [*order] and "Beyond the paper" not in first_screen
    names = ("profiler.py", "selection_solver_DP.py", "train.py", "ElasticScheme.select", "selection/elastic.py")
    assert all(name in first_screen for name in names)


def test_the_method_is_on_one_page() -> None:
    from elastic_trainer.selection.elastic import ElasticScheme

    page = inspect.getsource(ElasticScheme.select)
    assert len(page.splitlines()) <= 50
    at = [page.index(f"{step} (section {n})") for step, n in (("Importance", "4"), ("budget", "3.3"), ("solver", "6"))]
    assert sorted(at) == at
