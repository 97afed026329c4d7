"""run_figure.py: which runs each figure asks for, and figures that are made from real runs."""

import json
import signal
import subprocess
import sys
import time

import paper_figures
import pytest
import run_figure
from command_line import OFTEN, ROOT, run_here, train_here
from made_up_runs import rows_of
from resolutions import SCRIPT
from runner import carry_out
from small_images import write_noise
from small_tfds import prepare_small

import profiler
from elastic_trainer.cli.commands import parse_profiler
from elastic_trainer.datasets.named import DATASETS
from elastic_trainer.system.errors import UserError
from elastic_trainer.system.files import write_record

SMALL = ("--model_name", f"{ROOT}/tests/zoo.py:branches", "--input_size", "16")


def make_runs(*words):
    """The runs of a figure, by the words of its command line."""
    return run_figure.make_runs(run_figure.parse([*map(str, words)]))


def check_two_steps(folder, name):
    """The run in `folder` trained two steps on the data set `name`."""
    summary, config = (json.loads((folder / f"{kind}.json").read_text()) for kind in ("summary", "config"))
    assert summary["steps"] == 2 and config["num_classes"] == paper_figures.CLASSES[name]


@pytest.mark.parametrize("name", run_figure.NAMES)
def test_each_figure_has_a_script_and_only_runs_that_main_accepts(name):
    script = ROOT / "scripts" / (f"run_{name}.sh" if name.startswith("table") else f"run_figure{name}.sh")
    assert f'/figure.sh" {name} "$@"' in script.read_text() and script.stat().st_mode & 0o111
    for scale in ("full", "quick"):
        runs = make_runs(name, "--scale", scale, "--seeds", 2)
        assert len({run.folder for run in runs}) == len(runs) and {run.settings.seed for run in runs} == {0, 1}
        for run in runs:
            settings = run.settings
            assert settings.num_classes == paper_figures.CLASSES[settings.dataset_name]
            assert settings.train_type in run.folder.name and run.folder.name.endswith(f"_seed{settings.seed}")
            assert run.words[0] == (SCRIPT if "_tq" in settings.train_type else "main.py")
            assert run.words[-1] == "--resume"
            assert run.is_elastic or not name.endswith("_ego")
            profiled = parse_profiler(run.profile_words[1:])
            for key in ("model_name", "input_size", "batch_size", "num_classes", "optimizer", "alpha"):
                assert getattr(profiled, key) == getattr(settings, key), key
        if scale == "full":
            assert {(run.settings.input_size, run.settings.batch_size) for run in runs} == {(224, 4)}
            assert all(DATASETS[run.settings.dataset_name].is_tfds for run in runs)


def test_figures_with_runs_of_one_setting_share_their_folders():
    folders = {name: {run.folder for run in make_runs(name)} for name in run_figure.NAMES}
    assert folders["15ad"] < folders["15"] and folders["15ad"] < folders["17ac"]
    assert folders["17bd"] == folders["17ac"] and folders["22"] == folders["23"] < folders["17ac"]
    assert folders["18"] < folders["17ac"] and len(folders["17ac"] & folders["19"]) == 4


def test_dataset_name_and_model_name_replace_the_papers():
    more = ["--dataset_name", "oxford_iiit_pet", "--model_name", "mobilenetv2", "--", "--alpha", "0.5"]
    found = [run.settings for run in make_runs("15", *more)]
    assert len(found) == 4, "three data sets become one"
    assert {(one.dataset_name, one.model_name, one.alpha) for one in found} == {("oxford_iiit_pet", "mobilenetv2", 0.5)}


def test_a_figure_on_photos_has_the_papers_settings(tmp_path):
    """Those that differ by default for an image folder; the quick scale keeps the digits' own."""
    photos = write_noise(tmp_path / "photos")
    more = ["--dataset_name", "image_folder", "--data_dir", photos, "--model_name", "mobilenetv2", "--alpha", "0.35"]
    for run in make_runs("17ac", *more):
        training = run.settings
        assert (training.input_size, training.batch_size, training.alpha) == (224, 4, 0.35)
        assert (training.num_epochs, training.interval if run.is_elastic else 3) == (12, 3)
        assert (training.learning_rate, training.gradient_clipping, training.feature_cache) == (1e-4, 0, "off")
        assert not (training.average_head or training.starts_with_head or training.save_model or training.has_fillers)
        assert training.validation_share == 1 and training.warmup == 0
    quick = make_runs("15ad", "--scale", "quick")[0].settings
    assert (quick.input_size, quick.feature_cache, quick.has_fillers) == (64, "off", False)


def test_a_run_that_was_started_with_other_settings_is_refused_and_so_is_a_batch_that_the_run_chooses(tmp_path):
    [run, *_] = make_runs("15ad", "--scale", "quick", "--logdir", tmp_path, "--", "--learning_rate", "0.5")
    write_record(run.folder / "config.json", run.settings.to_record())
    assert not run.is_complete
    [same, *_] = make_runs("15ad", "--scale", "quick", "--logdir", tmp_path)
    with pytest.raises(UserError, match=r"holds a run made with --learning_rate 0\.5, not 0\.002; give another"):
        _ = same.is_complete
    with pytest.raises(UserError, match="--batch_size: give it"):
        make_runs("15ad", "--", "--preset", "photos")


def test_dry_run_lists_all_runs_and_writes_nothing(capsys, tmp_path):
    run_figure.dry_run(make_runs("17ac", "--logdir", tmp_path))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 9
    assert all(line.startswith("to do  ") for line in lines)
    assert not [*tmp_path.iterdir()]


# --- real runs --------------------------------------------------------------------------------------------------------


def wait_for(pattern, folder, process):
    """Wait until a file appears while a process runs."""
    start = time.monotonic()
    while not [*folder.glob(pattern)] and process.poll() is None:
        assert time.monotonic() - start < 200
        time.sleep(0.02)


@pytest.mark.usefixtures("quick_profiles")
def test_killed_runs_and_stopped_figures_continue_and_only_unfinished_runs_are_repeated(tmp_path, monkeypatch):
    words = [sys.executable, str(ROOT / "scripts/figures/run_figure.py"), "15_ego", "--scale", "quick", "--seeds", "2"]
    words += [*SMALL, "--batch_size", "64", "--output", str(tmp_path / "figure")]
    more = ["--", "--max_steps", "40", "--num_epochs", "4", "--rho", "0.9"]
    logs = tmp_path / "logs" / "figures_quick"

    def run(*command):
        done = subprocess.run([*map(str, command)], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    monkeypatch.chdir(tmp_path)
    first, second = make_runs(*words[2:], *more)
    run_here(profiler.main, *first.profile_words)
    # The second run is killed, then a figure is stopped while it does the first.
    job = [sys.executable, OFTEN, "0", *second.words[1:]]
    with subprocess.Popen(job, cwd=tmp_path, stderr=subprocess.DEVNULL) as killed:
        wait_for("*seed1/checkpoints/*.npz", logs, killed)
        killed.kill()
    assert killed.returncode == -signal.SIGKILL
    with subprocess.Popen([*words, *more], cwd=tmp_path, stderr=subprocess.PIPE, text=True) as stopped:
        wait_for("*seed0/events.out.*", logs, stopped)
        stopped.terminate()
        _, errors = stopped.communicate(timeout=60)
    assert stopped.returncode == 128 + signal.SIGTERM and "stopped; start it again to continue" in errors, errors
    assert len([*logs.glob("*seed0/checkpoints/*")]) == 1, "the run had time to save its checkpoint"
    run(sys.executable, ROOT / "main.py", *first.words[1:])
    [summary] = logs.glob("*/summary.json")
    made = summary.stat().st_mtime_ns
    continued = run(*words, *more)
    assert "1 of 2 runs are complete" in continued and continued.count("\nrun 1 of 1: ") == 1
    assert summary.stat().st_mtime_ns == made and len([*logs.glob("*/summary.json")]) == 2
    rows = rows_of(tmp_path / "figure")
    assert {(row["scheme"], row["seed"]) for row in rows} == {("ElasticTrainer ρ=90%", seed) for seed in "01"}
    with pytest.raises(UserError, match=r"holds a run made with --learning_rate 0.002, not 1.0; give another"):
        carry_out(make_runs(*words[2:], "--logdir", logs, *more, "--learning_rate", "1"))


def train_or_profile(run):
    """A run in this process; `carry_out` starts those of the test above in others."""
    if run.profile_only:
        run_here(profiler.main, *run.profile_words)
    else:
        train_here(*run.words[1:])


@pytest.mark.usefixtures("quick_profiles")
def test_first_run_of_each_figure_trains_two_steps_on_cub_as_tfds_prepares_it(tmp_path, monkeypatch):
    prepare_small(paper_figures.CUB, tmp_path / "data", monkeypatch)
    started = set()
    for figure in paper_figures.FIGURES:
        # The head alone takes nearly all of a step of this small network.
        more = ["--max_steps", "2", *([] if figure == "2" else ["--rho", "1"])]
        run = make_runs(figure, "--data_dir", tmp_path / "data", "--logdir", tmp_path / "logs", *SMALL, "--", *more)[0]
        train_or_profile(run)
        assert run.is_complete
        if not run.profile_only:
            started.add(run.folder)
    assert len(started) == 7  # the other figures start with one of these
    for folder in started:
        check_two_steps(folder, paper_figures.CUB)
