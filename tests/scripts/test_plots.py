"""The plots: what is drawn of made-up runs, and which runs go together."""

import json
from dataclasses import replace

import matplotlib.axes
import numpy as np
import paper_figures
import plot
import plot_selecting
import plotting
import pytest
from command_line import error_line
from conftest import make_small_model, make_table
from made_up_runs import EPOCHS, made_up_run, rows_of
from plotting import Sheet

from elastic_trainer.settings import Settings
from elastic_trainer.system.errors import UserError
from elastic_trainer.timing.table_file import save_table


def test_curves_average_the_seeds_and_the_csv_has_every_epoch(tmp_path):
    runs = [made_up_run(tmp_path / f"full{k}", seed=k, scale=1 + 0.2 * k) for k in range(3)]
    runs.append(made_up_run(tmp_path / "elastic", "elastic_training", rho=0.5, scale=0.5))
    groups = plotting.group_runs(runs)
    assert [len(group.runs) for group in groups] == [1, 3]
    table = plot.table(groups)
    assert "48.0%" in table and "48.0 " in table and "0.42" in table  # the mean of seeds; elastic over it: 20 / 48
    plot.curves(groups, Sheet(tmp_path / "curves"))
    rows = rows_of(tmp_path / "curves")
    assert len(rows) == 4 * EPOCHS
    last = [row for row in rows if row["seed"] == "2"][-1]
    assert float(last["seconds"]) == pytest.approx(1.4 * 40 + 8) and float(last["test_accuracy"]) == pytest.approx(0.56)


def test_bars_show_mean_and_spread_and_nan_for_unknown_energy(tmp_path):
    runs = [made_up_run(tmp_path / f"full{k}", seed=k, scale=1 + 0.2 * k) for k in range(3)]
    runs += [made_up_run(tmp_path / f"elastic{rho}", "elastic_training", rho, scale=rho) for rho in (0.4, 0.6)]
    groups = plotting.group_runs(runs)
    plot.bars(groups, Sheet(tmp_path / "bars"), "accuracy", "hours", "energy")
    rows = {(row["scheme"], row["quantity"]): row for row in rows_of(tmp_path / "bars")}
    full = rows["Full training", "test accuracy (%)"]
    assert float(full["mean"]) == pytest.approx(48) and float(full["standard_deviation"]) == pytest.approx(8)
    assert float(rows["ElasticTrainer ρ=40%", "training time (min)"]["mean"]) == pytest.approx(16 / 60)
    assert rows["Full training", "energy of training (J)"]["mean"] == "nan"


def test_flops_of_an_epoch_are_the_increase_of_the_total(tmp_path):
    runs = [made_up_run(tmp_path / "full"), made_up_run(tmp_path / "elastic", "elastic_training", 0.5, scale=0.5)]
    plot.flops(plotting.group_runs(runs), Sheet(tmp_path / "flops"))
    by_scheme: dict[str, list[float]] = {}
    for row in rows_of(tmp_path / "flops"):
        by_scheme.setdefault(row["scheme"], []).append(float(row["tflops"]))
    assert by_scheme == {
        "Full training": pytest.approx([1, 2, 3, 4]),
        "ElasticTrainer ρ=50%": pytest.approx([0.5, 1, 1.5, 2]),
    }


def test_maps_show_the_tensors_of_each_selection(tmp_path):
    groups = plotting.group_runs([made_up_run(tmp_path / "elastic", "elastic_training", 0.5)])
    plot.maps(groups, Sheet(tmp_path / "maps"))
    rows = rows_of(tmp_path / "maps")
    assert [(int(row["tensor"]), int(row["trained"])) for row in rows[:4]] == [(0, 1), (1, 1), (0, 0), (1, 1)]


def test_layers_are_sorted_by_their_number_with_their_step_times(tmp_path):
    runs = [
        made_up_run(tmp_path / f"layers{k}", "last_layers_training", scale=0.1 * k, trained_layers=k)
        for k in (5, 1, 10)
    ]
    plot.layers(plotting.group_runs(runs), Sheet(tmp_path / "layers"))
    rows = rows_of(tmp_path / "layers")
    assert [int(row["layers"]) for row in rows] == [1, 5, 10]
    assert [float(row["step_ms"]) for row in rows] == pytest.approx([10, 50, 100])


def test_similarity_and_overhead_fall_with_the_interval(tmp_path):
    runs = [made_up_run(tmp_path / "steady", "elastic_training", 0.5)]
    runs += [
        made_up_run(tmp_path / f"batches{k}", "elastic_training", 0.5, importance_batches=k, max_steps=8)
        for k in (1, 4)
    ]
    plot.importance(plotting.group_runs(runs), Sheet(tmp_path / "importance"))
    rows = rows_of(tmp_path / "importance")
    interval = [row for row in rows if row["kind"] == "interval"]
    # Two tensors a right angle apart: the cosine of the angle that importance has turned.
    assert [float(row["similarity"]) for row in interval] == pytest.approx(np.cos([0.3, 0.6, 0.9]))
    # Four selections of 1 s each in 40 s: 1 s for every 9 s of training, and half of it every other epoch.
    assert [float(row["overhead_percent"]) for row in interval] == pytest.approx([100 / 9, 50 / 9, 100 / 27])
    assert [row["value"] for row in rows if row["kind"] == "images"] == ["16", "64"]


def test_time_over_the_solvers_resolution_is_measured_time_of_an_epoch(tmp_path):
    solving = {"selection_part_seconds": {"solve": 0.2}}
    runs = [made_up_run(tmp_path / "full")]
    for count, (resolution, scale) in enumerate(((1000, 0.5), (10, 0.9))):
        runs.append(made_up_run(tmp_path / f"run{count}", f"elastic_training_tq{resolution}", 0.5, scale=scale))
        path = runs[-1] / "summary.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **solving}))
    plot_selecting.solver(plotting.group_runs(runs), Sheet(tmp_path / "solver"))
    rows = np.array([[*row.values()] for row in rows_of(tmp_path / "solver")], float)
    np.testing.assert_allclose(rows, np.array([[10, 90, 100 * 0.2 / 36], [1000, 50, 1]]))
    with pytest.raises(UserError, match="needs runs with several T_q and one of full_training"):
        plot_selecting.solver(plotting.group_runs(runs[1:]), Sheet(tmp_path / "none"))


def test_time_to_accuracy_is_compared_with_the_best_baseline(tmp_path):
    runs = [
        made_up_run(tmp_path / "elastic", "elastic_training", 0.5),  # reaches 0.4 at 48 s
        made_up_run(tmp_path / "full", scale=2.0),  # reaches 0.4 at its second epoch, 44 s
        made_up_run(tmp_path / "head", "traditional_tl_training", scale=0.5),  # never
    ]
    plot.time_to_accuracy(plotting.group_runs(runs), Sheet(tmp_path / "time"))
    rows = rows_of(tmp_path / "time")
    assert [row["best_baseline"] for row in rows] == ["Full training"] * 3
    assert [float(row["accuracy"]) for row in rows] == pytest.approx([0.36, 0.38, 0.4])
    assert [float(row["speedup"]) for row in rows] == pytest.approx([44 / 48] * 3)


def test_profiling_of_30_s_is_10_percent_of_an_epoch_of_300_s(tmp_path, monkeypatch):
    drawn = []
    vlines = matplotlib.axes.Axes.vlines

    def seen(self, x, *place, **how):
        drawn.append(x)
        return vlines(self, x, *place, **how)

    monkeypatch.setattr(matplotlib.axes.Axes, "vlines", seen)
    table = replace(make_table(make_small_model()), full_step_ms=200.0, details={"profiling_seconds": 30.0})
    save_table(table, Settings("resnet50", num_classes=200), tmp_path / "net")
    reference = paper_figures.REFERENCE["table1"]
    plot_selecting.profiling({tmp_path / "net": 1500}, Sheet(tmp_path / "profiling", reference=reference))
    [row] = rows_of(tmp_path / "profiling")
    assert float(row["percent"]) == pytest.approx(10) and drawn == [0.42]


def test_paper_values_are_marked_only_for_the_papers_setting(tmp_path, monkeypatch):
    config = {"dataset_name": "caltech_birds2011", "model_name": "resnet50", "input_size": 224, "batch_size": 4}
    runs = [made_up_run(tmp_path / "full", **config, num_epochs=12), made_up_run(tmp_path / "digits")]
    runs.append(made_up_run(tmp_path / "small", **{**config, "batch_size": 8}, num_epochs=12))
    drawn = []
    monkeypatch.setattr(matplotlib.axes.Axes, "hlines", lambda self, y, *place, **how: drawn.append(y))
    plot.bars(plotting.group_runs(runs), Sheet(tmp_path / "bars", reference=paper_figures.REFERENCE["22"]), "memory")
    assert drawn == [7.3]


def test_runs_are_grouped_only_if_they_differ_in_their_seed_alone(tmp_path):
    runs = [made_up_run(tmp_path / "first"), made_up_run(tmp_path / "other", seed=1)]
    runs += [made_up_run(tmp_path / "faster", learning_rate=1e-2)]
    # The folder of a known data set does not matter, that of an image_folder does.
    runs += [made_up_run(tmp_path / "elsewhere", seed=2, data_dir="datasets")]
    photos = {"dataset_name": "image_folder"}
    runs += [made_up_run(tmp_path / name, data_dir=name, **photos) for name in ("photos", "others")]
    assert sorted(len(group.runs) for group in plotting.group_runs(runs)) == [1, 1, 1, 3]
    with pytest.raises(UserError, match=r"/again: has the setting and the seed of .*/first; name one of them"):
        plotting.group_runs([*runs, made_up_run(tmp_path / "again")])


def test_colours_differ_between_budgets_and_not_between_data_sets(tmp_path):
    runs = [
        made_up_run(tmp_path / f"{data}{rho}", "elastic_training", rho, dataset_name=data)
        for data in ("digits", "oxford_iiit_pet")
        for rho in (0.4, 0.5)
    ]
    runs.append(made_up_run(tmp_path / "full"))
    colours = {(group.place[1], group.rho): group.colour for group in plotting.group_runs(runs)}
    assert colours["digits", 0.4] == colours["Oxford-IIIT Pet", 0.4] != colours["digits", 0.5]
    one_budget = plotting.group_runs([tmp_path / name for name in ("digits0.5", "full")])
    assert [group.colour for group in one_budget] == [group.look.colour for group in one_budget]


def test_title_of_a_quick_figure_names_the_scale_and_the_length_of_its_runs(tmp_path):
    groups = plotting.group_runs([made_up_run(tmp_path / "few", max_steps=12, weights="none")])
    title = Sheet(tmp_path / "few", "quick").figure(plotting.PAGE, 2, plotting.caption(groups)).get_suptitle()
    assert title.startswith("quick: ") and "12 steps, random weights, 1 seed" in title


def test_runs_of_one_data_set_with_different_batch_sizes_are_refused(tmp_path):
    runs = [made_up_run(tmp_path / "one"), made_up_run(tmp_path / "other", "traditional_tl_training", batch_size=8)]
    with pytest.raises(UserError, match=r"/other: --batch_size differs from that of .*/one; name runs of one setting"):
        plot.check_alike(plotting.group_runs(runs))
    elsewhere = made_up_run(tmp_path / "elsewhere", dataset_name="oxford_iiit_pet", num_classes=37)
    plot.check_alike(plotting.group_runs([runs[0], elsewhere]))


@pytest.mark.parametrize("data_dir", ["$\\frac{$", "caf\udce9 $5\n$"])
def test_names_with_dollars_and_odd_bytes_are_drawn(tmp_path, data_dir):
    odd = {"dataset_name": "image_folder", "data_dir": data_dir, "model_name": "$^$.keras"}
    runs = [
        made_up_run(tmp_path / "full", scale=2.0, **odd),
        made_up_run(tmp_path / "it", "elastic_training", 0.5, **odd),
    ]
    groups = plotting.group_runs(runs)
    plot.curves(groups, Sheet(tmp_path / "curves"))
    plot.bars(groups, Sheet(tmp_path / "bars"), "accuracy")
    plot.maps(groups[:1], Sheet(tmp_path / "maps"))
    plot.time_to_accuracy(groups, Sheet(tmp_path / "time"))
    table = replace(make_table(make_small_model()), details={"profiling_seconds": 3.0})
    save_table(table, Settings("resnet50", num_classes=200), tmp_path / "$^$")
    plot_selecting.profiling({tmp_path / "$^$": 1500}, Sheet(tmp_path / "profiling"))
    for stem in ("curves", "bars", "maps", "time", "profiling"):
        assert rows_of(tmp_path / stem)


def test_a_folder_as_output_is_refused_in_one_line():
    line = error_line("scripts/figures/plot.py", "curves", "RUN", "--output", ".")
    assert "--output: '.' is a folder; add a name, such as " in line


@pytest.mark.parametrize("broken", ["summary.json", "metrics.csv", None])
def test_a_folder_without_a_finished_run_is_named(tmp_path, broken):
    if broken:
        made_up_run(tmp_path / "run")
        (tmp_path / "run" / broken).write_text("")
    with pytest.raises(UserError, match="/run: contains no finished run"):
        plotting.group_runs([tmp_path / "run"])
