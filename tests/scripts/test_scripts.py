"""The scripts as a user starts them: from any folder, and the benchmarks on a small network."""

import json
import subprocess
import sys

import pytest
from command_line import NETWORK, ROOT, command, error_line

# Those with a --help: all but the two that record test data.
SCRIPTS = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("benchmarks/benchmark_*.py", "benchmarks/torture_resume.py", "figures/*.py")
    for path in (ROOT / "scripts").glob(pattern)
    if "__main__" in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_is_printed_in_any_folder(script, tmp_path):
    words = [sys.executable, ROOT / script, "--help"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert script.rpartition("/")[2] in done.stdout.splitlines()[0]


@pytest.mark.parametrize(
    ("script", "keys"),
    [
        ("time_model", {"median_error_percent", "p95_error_percent", "by_flops", "profiling_seconds"}),
        ("rho", {"rho", "kept"}),
        ("throttle", {"rho_in_the_disturbed_half", "deadline_seconds", "runs"}),
        ("step", {"step_ms", "over_unfolded", "full_over_keras", "peak_memory_mb"}),
        ("input", {"images_per_second", "waiting_percent", "step_ms", "reading_seconds"}),
    ],
)
def test_benchmark_prints_its_results_as_json_last_and_draws_a_figure(script, keys, tmp_path):
    more = ["--batch_size", "8", "--quick", "--output", tmp_path / "picture"]
    done = command(f"scripts/benchmarks/benchmark_{script}.py", *NETWORK, *more)
    assert done.returncode == 0, done.stderr
    assert keys <= set(json.loads(done.stdout.splitlines()[-1]))
    assert (tmp_path / "picture.png").stat().st_size > 1000 and (tmp_path / "picture.pdf").is_file()


def test_plotting_a_folder_without_a_run_is_refused(tmp_path):
    assert "contains no finished run" in error_line("scripts/figures/plot_accuracy_time.py", tmp_path)
