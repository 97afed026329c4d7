"""The figures: which runs each asks for, what is drawn of made-up logs, and one made for real."""

import csv
import dataclasses
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import paper_figures
import plot_accuracy_time
import plot_bars
import plot_costs
import plot_epochs
import plotting
import pytest
import report
import run_figure
from command_line import ROOT
from conftest import make_table
from small_tfds import prepare_small

import models
import utils
from elastic_trainer.cli.commands import parse_profiler
from elastic_trainer.datasets.names import TFDS_NAMES
from elastic_trainer.machine import environment
from elastic_trainer.networks.tensors import trained_mask
from elastic_trainer.timing.table import table_folder, table_settings
from utils import UserError

EPOCHS = 4


def numbers(stem):
    """The rows of a figure's CSV, once it is there as a picture too."""
    for ending in ("pdf", "png"):
        assert Path(f"{stem}.{ending}").stat().st_size > 1000
    with Path(f"{stem}.csv").open(newline="", encoding="utf-8") as file:
        return [*csv.DictReader(file)]


def made_up_run(folder, train_type="full_training", rho=None, seed=0, scale=1.0, **config):
    """The folder of a run of `EPOCHS` epochs of 10 s and 2 s of testing, whose accuracy rises by 0.1 an epoch."""
    folder.mkdir(parents=True)
    settings = {
        "dataset_name": "digits",
        "model_name": "mobilenetv2",
        "train_type": train_type,
        "rho": rho,
        "seed": seed,
        "run_name": folder.name,
        "learning_rate": 1e-3,
        "environment": environment(),
        **{"alpha": 0.35, "input_size": 64, "batch_size": 16, "num_classes": 10, "optimizer": "sgd"},
        **{"interval": 1, "importance_batches": 1, "trained_layers": 1, "num_epochs": EPOCHS, "max_steps": None},
        **config,
    }
    rows = [
        {
            "epoch": k,
            "train_seconds": 10 * scale * k,
            "validation_seconds": 2 * k,
            "test_accuracy": 0.1 * k * scale,
            "test_loss": 1 / k,
            "train_flops": 1e12 * scale * k * (k + 1) / 2,
        }
        for k in range(1, EPOCHS + 1)
    ]
    summary = {
        **{key: settings[key] for key in ("dataset_name", "model_name", "train_type", "rho", "seed")},
        "epochs": EPOCHS,
        "final_accuracy": 0.4 * scale,
        "train_seconds": 40 * scale,
        "selection_seconds": 4.0,
        "selection_percent": 10 / scale,
        "median_step_ms": 100 * scale,
        "train_flops": 1e13 * scale,
        "peak_memory_mb": 1000 * scale,
        "energy_joules": None,
    }
    utils.write_json(folder / "config.json", settings)
    utils.write_json(folder / "summary.json", summary)
    utils.write_csv(folder / "metrics.csv", [*rows[0]], [[*row.values()] for row in rows])
    # Importance turns a little each epoch; so similarity falls with distance.
    chosen, columns = [], ["epoch", "step", "name", "importance", "chosen"]
    for epoch in range(EPOCHS):
        angles = 0.3 * epoch + np.array([0, np.pi / 2])
        chosen += [(epoch, epoch, f"t{k}", np.cos(angle), int(k >= epoch % 2)) for k, angle in enumerate(angles)]
    utils.write_csv(folder / "selections.csv", columns, chosen)
    return folder


# --- which runs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", run_figure.NAMES)
def test_every_figure_has_a_script_and_asks_for_runs_that_main_understands(name):
    script = ROOT / "scripts" / (f"run_{name}.sh" if name.startswith("table") else f"run_figure{name}.sh")
    assert f'/figure.sh" {name} "$@"' in script.read_text() and script.stat().st_mode & 0o111
    for scale in ("full", "quick"):
        jobs = run_figure.make_jobs(run_figure.parse([name, "--scale", scale, "--seeds", "2"]))
        assert len({job.folder for job in jobs}) == len(jobs) and {job.run.seed for job in jobs} == {0, 1}
        for job in jobs:
            assert job.args.num_classes == paper_figures.CLASSES[job.run.dataset_name], "each data set's own head"
            assert job.args.train_type == job.run.train_type and job.args.seed == job.run.seed
            assert job.train[-1] == "--resume"
            if job.run.is_elastic:
                assert job.profile is not None
                profiled = parse_profiler(job.profile)
                for key in ("model_name", "input_size", "batch_size", "num_classes", "optimizer", "augment", "alpha"):
                    assert getattr(profiled, key) == getattr(job.args, key), key
            else:
                assert job.profile is None and not name.endswith("_ego")
        if scale == "full":
            assert {job.args.input_size for job in jobs} == {224} and {job.args.batch_size for job in jobs} == {4}
            assert {job.run.dataset_name for job in jobs} <= {*TFDS_NAMES}


def test_figures_share_the_runs_of_one_setting():
    folders = {
        name: {job.folder for job in run_figure.make_jobs(run_figure.parse([name]))} for name in run_figure.NAMES
    }
    assert folders["15ad"] < folders["15"] and folders["15ad"] < folders["17ac"]
    assert folders["17bd"] == folders["17ac"] and folders["22"] == folders["23"] < folders["17ac"]
    assert folders["18"] < folders["17ac"] and len(folders["17ac"] & folders["19"]) == 4


def test_other_data_and_networks_take_the_place_of_the_papers():
    more = ["--dataset_name", "oxford_iiit_pet", "--model_name", "mobilenetv2", "--", "--alpha", "0.5"]
    jobs = run_figure.make_jobs(run_figure.parse(["15", *more]))
    assert len(jobs) == 4, "three data sets became one"
    assert {(job.args.dataset_name, job.args.model_name, job.args.alpha) for job in jobs} == {
        ("oxford_iiit_pet", "mobilenetv2", 0.5)
    }


def test_a_dry_run_lists_the_runs_and_the_papers_hours(capsys, tmp_path):
    args = run_figure.parse(["17ac", "--logdir", str(tmp_path)])
    run_figure.dry_run(run_figure.make_jobs(args), paper_figures.FIGURES["17ac"].hours)
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith("to do  ")]) == 9
    assert "9 runs without a table" in lines[-2] and lines[-1].endswith(
        "15 h on a Jetson TX2, 190 h on a Raspberry Pi 4B"
    )
    assert not [*tmp_path.iterdir()]


def test_hours_come_from_the_timing_table(tmp_path):
    network = ["--model_name", f"{ROOT}/tests/zoo.py:branches", "--input_size", "16", "--batch_size", "64"]
    jobs = run_figure.make_jobs(run_figure.parse(["17ac", "--scale", "quick", "--logdir", str(tmp_path), *network]))
    images = run_figure.image_counts(jobs[0].args)
    assert images == (898, 899) and {run_figure.estimated_hours(job, images) for job in jobs} == {None}
    args = jobs[0].args
    keras.utils.clear_session()
    model = models.build_from_options(args)
    table = dataclasses.replace(make_table(model), settings=table_settings(args))
    table.details["environment"] = environment()
    table.save(table_folder(args))
    steps, testing_ms = 4 * (898 // 64), 4 * 15 * table.forward_ms
    for job in jobs:
        mask = trained_mask(model, job.args.train_type)
        step_ms = table.full_step_ms * job.args.rho if job.run.is_elastic else table.predict_ms(mask)
        hours = (steps * step_ms + testing_ms) / 3.6e6
        assert run_figure.estimated_hours(job, images) == pytest.approx(hours), job.args.run_name


# --- what is drawn ----------------------------------------------------------------------------------------------------


def test_curves_are_the_mean_over_seeds_and_every_point_is_in_the_csv(tmp_path):
    runs = [made_up_run(tmp_path / f"full{k}", seed=k, scale=1 + 0.2 * k) for k in range(3)]
    runs.append(made_up_run(tmp_path / "elastic", "elastic_training", rho=0.5, scale=0.5))
    groups = plotting.group_runs(runs)
    assert [len(group.runs) for group in groups] == [1, 3]
    table = plot_accuracy_time.table(groups)
    assert "48.0%" in table and "48.0 " in table and "0.42" in table  # the mean of seeds; elastic over it: 20 / 48
    plot_accuracy_time.draw(groups, tmp_path / "curves")
    rows = numbers(tmp_path / "curves")
    assert len(rows) == 4 * EPOCHS
    last = [row for row in rows if row["seed"] == "2"][-1]
    assert float(last["seconds"]) == pytest.approx(1.4 * 40 + 8) and float(last["test_accuracy"]) == pytest.approx(0.56)


def test_bars_show_mean_and_spread_and_say_what_is_unknown(tmp_path):
    runs = [made_up_run(tmp_path / f"full{k}", seed=k, scale=1 + 0.2 * k) for k in range(3)]
    runs += [made_up_run(tmp_path / f"elastic{rho}", "elastic_training", rho, scale=rho) for rho in (0.4, 0.6)]
    groups = plotting.group_runs(runs)
    plot_bars.draw(groups, ("accuracy", "hours", "energy"), tmp_path / "bars")
    rows = {(row["scheme"], row["quantity"]): row for row in numbers(tmp_path / "bars")}
    full = rows["Full training", "test accuracy (%)"]
    assert float(full["mean"]) == pytest.approx(48) and float(full["standard_deviation"]) == pytest.approx(8)
    assert float(rows["ElasticTrainer ρ=40%", "training time (min)"]["mean"]) == pytest.approx(16 / 60)
    assert rows["Full training", "energy of training (J)"]["mean"] == "nan"


def test_flops_of_an_epoch_are_what_that_epoch_added(tmp_path):
    runs = [made_up_run(tmp_path / "full"), made_up_run(tmp_path / "elastic", "elastic_training", 0.5, scale=0.5)]
    plot_epochs.draw_flops(plotting.group_runs(runs), tmp_path / "flops")
    by_scheme: dict[str, list[float]] = {}
    for row in numbers(tmp_path / "flops"):
        by_scheme.setdefault(row["scheme"], []).append(float(row["tflops"]))
    assert by_scheme == {
        "Full training": pytest.approx([1, 2, 3, 4]),
        "ElasticTrainer ρ=50%": pytest.approx([0.5, 1, 1.5, 2]),
    }


def test_maps_hold_each_selection(tmp_path):
    plot_epochs.draw_maps(
        plotting.group_runs([made_up_run(tmp_path / "elastic", "elastic_training", 0.5)]), tmp_path / "maps"
    )
    rows = numbers(tmp_path / "maps")
    assert [(int(row["tensor"]), int(row["trained"])) for row in rows[:4]] == [(0, 1), (1, 1), (0, 0), (1, 1)]


def test_layers_against_accuracy_and_step(tmp_path):
    runs = [
        made_up_run(tmp_path / f"layers{k}", "last_layers_training", scale=0.1 * k, trained_layers=k)
        for k in (5, 1, 10)
    ]
    plot_costs.draw_layers(plotting.group_runs(runs), tmp_path / "layers")
    rows = numbers(tmp_path / "layers")
    assert [int(row["layers"]) for row in rows] == [1, 5, 10]
    assert [float(row["step_ms"]) for row in rows] == pytest.approx([10, 50, 100])


def test_similarity_falls_with_the_distance_and_overhead_with_the_interval(tmp_path):
    runs = [made_up_run(tmp_path / "steady", "elastic_training", 0.5)]
    runs += [
        made_up_run(tmp_path / f"batches{k}", "elastic_training", 0.5, importance_batches=k, max_steps=8)
        for k in (1, 4)
    ]
    plot_costs.draw_importance(plotting.group_runs(runs), tmp_path / "importance")
    rows = numbers(tmp_path / "importance")
    interval = [row for row in rows if row["kind"] == "interval"]
    # Two tensors a right angle apart: the cosine of the angle that importance has turned.
    assert [float(row["similarity"]) for row in interval] == pytest.approx(np.cos([0.3, 0.6, 0.9]))
    # Four selections of 1 s each in 40 s: 1 s for every 9 s of training, and half of it every other epoch.
    assert [float(row["overhead_percent"]) for row in interval] == pytest.approx([100 / 9, 50 / 9, 100 / 27])
    assert [row["value"] for row in rows if row["kind"] == "images"] == ["16", "64"]


def test_time_to_accuracy_is_held_against_the_best_baseline(tmp_path):
    runs = [
        made_up_run(tmp_path / "elastic", "elastic_training", 0.5),  # reaches 0.4 at 48 s
        made_up_run(tmp_path / "full", scale=2.0),  # reaches 0.4 at its second epoch, 44 s
        made_up_run(tmp_path / "head", "traditional_tl_training", scale=0.5),  # never
    ]
    plot_costs.draw_time_to_accuracy(plotting.group_runs(runs), tmp_path / "time")
    rows = numbers(tmp_path / "time")
    assert [row["best_baseline"] for row in rows] == ["Full training"] * 3
    assert [float(row["accuracy"]) for row in rows] == pytest.approx([0.36, 0.38, 0.4])
    assert [float(row["speedup"]) for row in rows] == pytest.approx([44 / 48] * 3)


def test_profiling_is_held_against_an_epoch(tmp_path, monkeypatch):
    import matplotlib.axes

    drawn = []
    vlines = matplotlib.axes.Axes.vlines

    def seen(self, x, *place, **how):
        drawn.append(x)
        return vlines(self, x, *place, **how)

    monkeypatch.setattr(matplotlib.axes.Axes, "vlines", seen)
    record = {"full_step_ms": 200.0, "profiling_seconds": 30.0, "model_name": "resnet50", "input_size": 224}
    utils.write_json(tmp_path / "net" / "profile.json", record)
    reference = paper_figures.REFERENCE["table1"]
    plot_costs.draw_profiling({tmp_path / "net": 1500}, tmp_path / "profiling", reference)
    [row] = numbers(tmp_path / "profiling")
    assert float(row["percent"]) == pytest.approx(10) and drawn == [0.42]


def test_marks_of_the_paper_are_drawn_where_the_setting_is_its(tmp_path, monkeypatch):
    config = {"dataset_name": "caltech_birds2011", "model_name": "resnet50", "input_size": 224, "batch_size": 4}
    runs = [made_up_run(tmp_path / "full", **config, num_epochs=12), made_up_run(tmp_path / "digits")]
    runs.append(made_up_run(tmp_path / "small", **{**config, "batch_size": 8}, num_epochs=12))
    drawn = []
    import matplotlib.axes

    monkeypatch.setattr(matplotlib.axes.Axes, "hlines", lambda self, y, *place, **how: drawn.append(y))
    plot_bars.draw(plotting.group_runs(runs), ("memory",), tmp_path / "bars", paper_figures.REFERENCE["22"])
    assert drawn == [7.3]


def test_the_report_holds_every_figure_and_says_which_claims_hold(tmp_path):
    logs = tmp_path / "logs"
    made_up_run(logs / "full", scale=4.0)
    made_up_run(logs / "elastic", "elastic_training", 0.5, scale=1.0)
    plot_bars.draw(plotting.group_runs([*logs.iterdir()]), ("accuracy",), tmp_path / "figure20_quick")
    text = report.page("quick", logs, tmp_path)
    assert text.count("<img ") == 1 and "data:image/png;base64,iVBOR" in text and "http" not in text
    verdicts = dict(re.findall(r"<tr><td>([^<]*)</td><td class=\"\w+\">([^<]*)</td>", text))
    seen = ["held", "held", "not tested", "not held", "not held", "not tested", "not tested"]
    assert list(verdicts.values()) == seen
    assert verdicts["up to 3.5 times faster than full training"] == "held" and "4.00× faster" in text
    assert "at most 120.0 points lost" in text and environment()["processor"] in text
    assert "Not made: 2,7,13" in text and "<summary>all 2 runs</summary>" in text
    with pytest.raises(UserError, match="holds no figure of scale full"):
        report.page("full", logs, tmp_path)


def test_runs_are_averaged_only_if_nothing_but_their_seed_differs(tmp_path):
    runs = [made_up_run(tmp_path / "first"), made_up_run(tmp_path / "other", seed=1)]
    runs += [made_up_run(tmp_path / "faster", learning_rate=1e-2)]
    runs += [
        made_up_run(tmp_path / "elsewhere", seed=2, data_dir="datasets")
    ]  # where a known data set lies is no matter
    photos = {"dataset_name": "image_folder"}
    runs += [made_up_run(tmp_path / name, data_dir=name, **photos) for name in ("photos", "others")]
    assert sorted(len(group.runs) for group in plotting.group_runs(runs)) == [1, 1, 1, 3]
    with pytest.raises(UserError, match=r"/again: has the setting and the seed of .*/first; name one of them"):
        plotting.group_runs([*runs, made_up_run(tmp_path / "again")])


def test_a_scheme_has_one_colour_on_all_data_sets_and_each_budget_its_own(tmp_path):
    runs = [
        made_up_run(tmp_path / f"{data}{rho}", "elastic_training", rho, dataset_name=data)
        for data in ("digits", "oxford_iiit_pet")
        for rho in (0.4, 0.5)
    ]
    runs.append(made_up_run(tmp_path / "full"))
    groups = plotting.group_runs(runs)
    colours = dict(zip(((g.place[1], g.first.summary["rho"]) for g in groups), plotting.colours(groups), strict=True))
    assert colours["digits", 0.4] == colours["Oxford-IIIT Pet", 0.4] != colours["digits", 0.5]
    alone = [group for group in groups if group.first.summary["rho"] in (0.5, None)]
    assert {*plotting.colours(alone)} == {look.colour for look in [*plotting.LOOKS.values()][:2]}


def test_the_figure_says_that_it_is_a_quick_one_and_how_long_its_runs_were(tmp_path, monkeypatch):
    monkeypatch.setattr(plotting, "SCALE", "quick")
    groups = plotting.group_runs([made_up_run(tmp_path / "few", max_steps=12, weights="none")])
    title = plotting.new_figure(plotting.PAGE, 2, plotting.setting(groups)).get_suptitle()
    assert title.startswith("quick: ") and "12 steps, random weights, 1 seed" in title


def test_runs_of_different_settings_are_not_compared_in_one_panel(tmp_path):
    runs = [made_up_run(tmp_path / "one"), made_up_run(tmp_path / "other", "traditional_tl_training", batch_size=8)]
    with pytest.raises(UserError, match=r"/other: --batch_size differs from that of .*/one; name runs of one setting"):
        plot_accuracy_time.check_alike(plotting.group_runs(runs))
    elsewhere = made_up_run(tmp_path / "elsewhere", dataset_name="oxford_iiit_pet", num_classes=37)
    plot_accuracy_time.check_alike(plotting.group_runs([runs[0], elsewhere]))


@pytest.mark.parametrize("broken", ["summary.json", "metrics.csv", None])
def test_what_is_no_finished_run_is_named(tmp_path, broken):
    if broken:
        made_up_run(tmp_path / "run")
        (tmp_path / "run" / broken).write_text("")
    with pytest.raises(UserError, match="/run: does not hold a finished run"):
        plotting.group_runs([tmp_path / "run"])


# --- for real ---------------------------------------------------------------------------------------------------------


def test_a_figure_is_made_its_runs_are_kept_and_a_broken_one_is_made_good(tmp_path, capsys):
    words = [
        sys.executable,
        ROOT / "scripts" / "figures" / "run_figure.py",
        "15_ego",
        "--scale",
        "quick",
        "--seeds",
        "3",
    ]
    words += ["--model_name", f"{ROOT}/tests/zoo.py:branches", "--input_size", "16", "--batch_size", "64"]
    words += ["--logdir", tmp_path / "logs", "--output", tmp_path / "figure", "--", "--max_steps", "20"]

    def make():
        done = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=400, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    with subprocess.Popen([*map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as first:
        begun = time.monotonic()
        while not [*(tmp_path / "logs").glob("*/events.out.*")] and first.poll() is None:
            assert time.monotonic() - begun < 200
            time.sleep(0.1)
        first.terminate()
        _, errors = first.communicate(timeout=60)
    assert first.returncode == 128 + signal.SIGTERM and "stopped; started again, this goes on" in errors, errors
    assert len([*(tmp_path / "logs").glob("*/checkpoints/*")]) == 1, "the run was let go to its checkpoint"
    assert "0 of 3 runs are complete" in make()
    rows = numbers(tmp_path / "figure")
    assert {(row["scheme"], row["seed"]) for row in rows} == {("ElasticTrainer ρ=50%", seed) for seed in "012"}
    folders = sorted(path.parent for path in (tmp_path / "logs").glob("*/summary.json"))
    assert len(folders) == 3
    kept = {folder: (folder / "summary.json").stat().st_mtime_ns for folder in folders}
    (folders[0] / "summary.json").unlink()  # as if it had been cut off before its end
    again = make()
    assert "2 of 3 runs are complete" in again and again.count("\nrun 1 of 1: ") == 1
    changed = [folder for folder in folders if (folder / "summary.json").stat().st_mtime_ns != kept[folder]]
    assert changed == folders[:1]
    for folder in folders[1:]:
        assert len([*folder.glob("events.out.*")]) == 1, "a fresh event file a run"
    done = subprocess.run([*map(str, words), "--learning_rate", "1"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "holds a run made with --learning_rate 0.002, not 1.0; give another" in done.stderr


def test_each_full_size_script_starts_its_first_run_on_cub_as_tfds_prepares_it(tmp_path, monkeypatch):
    prepare_small(paper_figures.CUB, tmp_path / "data", monkeypatch)
    folders = ["--data_dir", str(tmp_path / "data"), "--logdir", str(tmp_path / "logs")]
    small = ["--model_name", f"{ROOT}/tests/zoo.py:branches", "--weights", "none", "--input_size", "16"]
    started = set()
    for figure in paper_figures.FIGURES:
        more = ["--max_steps", "2", *([] if figure == "2" else ["--rho", "0.95"])]  # no 35 % of so small a network
        job = run_figure.make_jobs(run_figure.parse([figure, *folders, *small, "--", *more]))[0]
        run_figure.carry_out([job])
        assert job.is_complete
        if not job.run.profile_only:
            started.add(job.folder)
    assert len(started) == 6  # the others begin with one of these
    for folder in started:
        check_two_steps(folder, paper_figures.CUB)


@pytest.mark.parametrize("name", [paper_figures.PET, paper_figures.DOGS])
def test_full_size_runs_start_on_the_other_data_sets_as_tfds_prepares_them(name, tmp_path, monkeypatch):
    prepare_small(name, tmp_path / "data", monkeypatch)
    figure = ["15", "--data_dir", str(tmp_path / "data"), "--logdir", str(tmp_path / "logs")]
    small = ["--model_name", "mobilenetv2", "--weights", "none", "--input_size", "32"]
    jobs = run_figure.make_jobs(run_figure.parse([*figure, *small, "--", "--max_steps", "2"]))
    [job] = [job for job in jobs if job.run.dataset_name == name and job.run.train_type == "full_training"]
    run_figure.carry_out([job])
    assert re.fullmatch(rf"mobilenetv2_{name}_full_training_seed0", job.folder.name)
    check_two_steps(job.folder, name)


def check_two_steps(folder, name):
    summary, config = (json.loads((folder / f"{kind}.json").read_text()) for kind in ("summary", "config"))
    assert summary["steps"] == 2 and config["num_classes"] == paper_figures.CLASSES[name]
