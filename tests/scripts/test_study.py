"""The study: its runs fit their budgets, its data are split by person, and its page shows its files."""

import csv
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import keras
import numpy as np
import pytest
import results_page
import run_study
from conftest import make_small_model, make_table
from made_up_runs import made_up_run
from PIL import Image
from plotting import ROOT
from run_study import study_parser
from study_data import split_folder
from study_parts import AVERAGING_SECONDS, EPOCHS, LOOP_MS, PARTS, SELECTION_SECONDS, Basis, StudyRun

from elastic_trainer.cli.checks import without_effect
from elastic_trainer.cli.commands import parse_training
from elastic_trainer.networks.tensors import head_mask
from elastic_trainer.selection.named import SCHEMES
from elastic_trainer.settings.flags import as_words
from elastic_trainer.system.errors import UserError

STEPS = 100  # an epoch


def basis(model, **changed):
    return Basis({}, replace(make_table(model), **changed), head_mask(model), STEPS)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("data", ["grocery", "sign_digits"])
def test_each_run_has_a_name_of_its_own_and_flags_that_main_takes(part, data, small_model):
    runs, shared = PARTS[part](data, 2), basis(small_model)
    assert len({run.name for run in runs}) == len(runs)
    for run in runs:
        size = {"batch_size": run.batch_size, "dataset_name": "image_folder", "data_dir": "photos"}
        flags = {**run.flags(shared), **size}
        training = parse_training(as_words(flags))
        assert without_effect(flags, training) == [] and training.train_type == run.train_type
        if run.train_type == "closed_form_head":
            assert training.max_steps == 1
        elif run.part == "one_command":
            seconds = run.budget * shared.full_seconds
            assert training.deadline == pytest.approx(seconds, abs=0.1) and training.starts_with_head
        else:
            assert 0 < (training.max_steps or 0) <= STEPS * training.num_epochs


@pytest.mark.parametrize("train_type", ["full_training", "elastic_training"])
def test_steps_fill_the_budget_by_the_table(train_type):
    model = make_small_model()
    shared = basis(model, full_step_ms=50.0)
    rho = 0.3 if SCHEMES[train_type].is_elastic else None
    run = StudyRun("equal_time", "x", "grocery", "test", train_type, 1e-3, 0.5, rho=rho)
    steps = run.flags(shared)["max_steps"]
    step_ms = {"full_training": 50.0, "elastic_training": 0.3 * 50.0}[train_type]
    beside = AVERAGING_SECONDS + STEPS * shared.table.forward_ms / 1e3 + (SELECTION_SECONDS if rho else 0)
    seconds = steps * (step_ms + LOOP_MS) / 1e3 + beside
    assert seconds == pytest.approx(0.5 * EPOCHS * STEPS * (50.0 + LOOP_MS) / 1e3, abs=0.1)


def test_no_person_is_in_two_splits(tmp_path):
    for digit in range(3):
        (tmp_path / "sign_digits" / str(digit)).mkdir(parents=True)
        for person in range(20):
            (tmp_path / "sign_digits" / str(digit) / f"IMG_{1118 + 10 * person + digit}.JPG").touch()
    persons = {}
    for split in ("val", "test"):
        folder = split_folder(tmp_path, "sign_digits", split, tmp_path / "links")
        assert split_folder(tmp_path, "sign_digits", split, tmp_path / "links") == folder
        for part in ("train", "test"):
            photos = [path for path in (folder / part).glob("*/*") if path.resolve().is_file()]
            persons[split, part] = {(int(path.stem[4:]) - 1118) // 10 for path in photos}
            assert len(photos) == 3 * len(persons[split, part]) > 0
    assert persons["val", "train"] == persons["test", "train"] and len(persons["val", "train"]) == 12
    parts = [persons["val", "train"], persons["val", "test"], persons["test", "test"]]
    assert len(set().union(*parts)) == sum(map(len, parts)) == 20


def test_missing_data_set_is_one_clear_line(tmp_path):
    with pytest.raises(UserError, match=r"--data_root .*: has no folder grocery; get the data sets of"):
        split_folder(tmp_path, "grocery", "val", tmp_path)


def test_one_command_gets_a_share_of_the_wall_time_of_full_training(tmp_path):
    args = study_parser().parse_args(["one_command", "--results", str(tmp_path)])
    with pytest.raises(UserError, match=r"equal_time_grocery.csv: has no row of full training .* run .* equal_time"):
        run_study.wall_seconds(args)
    seconds = [("full, batch 4", 100), ("full, batch 4", 110), ("full, batch 32", 50)]
    rows = [(setting, 1.0, 0.01, seed, 0.5, 9.0, elapsed) for seed, (setting, elapsed) in enumerate(seconds)]
    write_results(tmp_path, rows, "equal_time_grocery")
    assert run_study.wall_seconds(args) == 105


def test_a_part_that_needs_photos_names_the_flags_that_give_them(tmp_path):
    args = study_parser().parse_args(["equal_time", "--logdir", str(tmp_path)])
    with pytest.raises(UserError, match="--data_root, --weights_file: are needed for the part equal_time"):
        run_study.make_runs(args, PARTS["equal_time"]("grocery", 1)[:1], 0)


def test_rows_of_earlier_sessions_stay_and_are_not_repeated(tmp_path, monkeypatch):
    words = ["memory", "--results", str(tmp_path), "--logdir"]
    now, later = (study_parser().parse_args([*words, str(tmp_path / name)]) for name in ("now", "later"))
    first, second, third = PARTS["memory"]("grocery", 1)[:3]
    for run in (second, third):
        made_up_run(run.folder(now.logdir))
    run_study.write(now, [first, second, third])

    asked = []

    def make_no_runs(args, runs, core):
        asked.extend(runs)
        return []

    monkeypatch.setattr(run_study, "make_runs", make_no_runs)
    monkeypatch.setattr("sys.argv", ["run_study.py", *words, str(later.logdir), "--seeds", "2"])
    run_study.main()
    assert [run for run in asked if run.seed == 0] == [first, *PARTS["memory"]("grocery", 1)[3:]]
    assert len([run for run in asked if run.seed == 1]) == len(PARTS["memory"]("grocery", 1))

    made_up_run(first.folder(later.logdir))
    made_up_run(third.folder(later.logdir), scale=2.0)
    run_study.write(later, [first, third])  # the second is no longer asked for
    with Path(tmp_path / "memory_grocery.csv").open(newline="") as file:
        rows = [*csv.DictReader(file)]
    assert [row["setting"] for row in rows] == [first.label, third.label, second.label]
    assert [float(row["train_seconds"]) for row in rows] == [40.0, 80.0, 40.0]


def write_results(folder, rows, name="budget_x"):
    """A file of runs: (setting, budget, learning rate, seed, accuracy, seconds, seconds in all)."""
    columns = ["setting", "budget", "learning_rate", "seed", *results_page.MEASURED][: len(rows[0])]
    path = folder / f"{name}.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])
    return path


FULL = [("full", 0.25, 0.003, seed, accuracy, 10.0) for seed, accuracy in enumerate((0.5, 0.6, 0.7))]
HEAD = ("head", 0.5, 0.01, 0, 0.4, 3.4)


def test_table_has_mean_and_spread_over_seeds(tmp_path):
    lines = results_page.table(write_results(tmp_path, [*FULL, HEAD])).splitlines()
    assert lines[0] == "| setting | 1/4 of the time | 1/2 of the time |"
    assert lines[2:] == ["| full | 60.0 ± 10.0 % (10 ± 0 s) |  |", "| head |  | 40.0 % (3 s) |"]


def test_deadlines_stand_beside_full_training_with_what_all_of_it_took(tmp_path):
    for data, seconds in (("a", 7.0), ("b", 9.0)):
        write_results(tmp_path, [("deadline", 0.25, 0.02, 0, 0.6, 5.0, seconds)], f"one_command_{data}")
        full = [
            (*results_page.REFERENCE, 0.003, 0, 0.7, 20.0, 4 * seconds),
            ("full, batch 32", 1.0, 0.02, 0, 0.5, 9.0, 9.0),
        ]
        write_results(tmp_path, full, f"equal_time_{data}")
    lines = results_page.waited_table(tmp_path / "one_command.csv").splitlines()
    assert lines[0] == "| scheme | planned share | a | b |"
    assert lines[2:] == [
        "| `main.py --deadline` | 1/4 | 60.0 % (7 s, 0.25) | 60.0 % (9 s, 0.25) |",
        "| full training, batch 4 | 1 | 70.0 % (28 s, 1.00) | 70.0 % (36 s, 1.00) |",
    ]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("elastic 0.4, no cache", "ElasticTrainer, by importance, ρ = 0.4, no cache"),
        ("head, no cache", "new head alone, no cache"),
        ("upper 0.25", "ElasticTrainer, upper part, ρ = 0.25"),
    ],
)
def test_settings_in_words(setting, words):
    assert results_page.in_words(setting) == words


@pytest.mark.parametrize("path", results_page.PAGES, ids=lambda path: path.name)
def test_page_shows_the_present_files(path):
    page = path.read_text(encoding="utf-8")
    assert page == results_page.updated(page), "run python scripts/study/results_page.py"


def test_what_others_reach_is_the_best_so_far_at_each_time(tmp_path):
    path = tmp_path / "others_x.csv"
    rows = [("pytorch_full", 300, seed, "20:0.5 50:0.4 200:0.8", "") for seed in (0, 1)]
    rows += [
        ("main.py --deadline", seconds, 0, f"{seconds - 1}:{0.5 + seconds / 1e3}", "") for seconds in (30, 60, 120, 300)
    ]
    rows.append(("lda", 300, 0, "70:0.6", ""))
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("method", "seconds", "seed", "curve", "commit"), *rows])
    lines = results_page.others_table(tmp_path / "others.csv").splitlines()
    assert lines[2:] == [
        "| PyTorch's tutorial, all layers | 50.0 · 50.0 · 50.0 · 80.0 |",
        "| **`main.py --deadline`** | 53.0 · 56.0 · 62.0 · 80.0 |",
        "| the same, linear discriminant analysis | – · – · 60.0 · 60.0 |",
    ]


def test_one_of_the_others_runs_on_the_photos_of_the_study(tmp_path):
    """A row a run, which is not repeated; the network and its weights are those of main.py."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 6), ("test", 3)):
        for name in ("a", "b"):
            folder = tmp_path / "root" / "dogs" / part / name
            folder.mkdir(parents=True)
            for index in range(count):
                photo = rng.integers(0, 128, (40, 40, 3), np.uint8) + 100 * (name == "b")
                Image.fromarray(photo.astype(np.uint8)).save(folder / f"{index}.png")
    weights = tmp_path / "random.weights.h5"
    keras.applications.MobileNetV2((160, 160, 3), 0.35, include_top=False, weights=None).save_weights(weights)
    words = [
        "--data",
        "dogs",
        "--data_root",
        tmp_path / "root",
        "--weights_file",
        weights,
        "--logdir",
        tmp_path / "logs",
    ]
    words += ["--results", tmp_path, "--only", "lda_*"]
    command = [sys.executable, ROOT / "scripts/study/compare_others.py", *words]
    for _ in range(2):
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=True)
    [row] = csv.DictReader((tmp_path / "others_dogs.csv").open())
    seconds, accuracy = map(float, row["curve"].split(":"))
    assert row["method"] == "lda" and seconds > 1 and 0 <= accuracy <= 1 and "lda" not in done.stdout
