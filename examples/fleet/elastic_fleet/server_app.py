"""The server: it averages what the boards trained, and writes the model, a table and a curve."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

from elastic_fleet import task
from elastic_fleet.strategy import ARRAYS, METRICS, ElasticAverage, to_record

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run all rounds, and write their results to a folder of `output`."""
    config = context.run_config
    folder = Path(str(config["output"])).absolute() / f"run_{context.run_id}"
    folder.mkdir(parents=True)
    model, timeout = task.make_network(config), float(config["timeout"])
    initial = to_record(task.get_arrays(model))
    while (count := len([*grid.get_node_ids()])) < int(config["min-boards"]):
        print(f"{count} boards are here, {config['min-boards']} are needed", flush=True)
        time.sleep(3)
    strategy = ElasticAverage(task.with_head)
    strategy.start(grid, initial, num_rounds=int(config["rounds"]), timeout=timeout)
    arrays, tested = strategy.best
    if not tested:
        raise RuntimeError("no board has tested a model; see the log for the reasons")
    task.set_arrays(model, arrays)
    _write(folder / "model.keras", model.save)
    lines = [",".join(map(str, row)) for row in ([*strategy.rounds[0]], *(one.values() for one in strategy.rounds))]
    _write(folder / "rounds.csv", lambda path: path.write_text("\n".join(lines) + "\n"))
    _write(folder / "accuracy.png", lambda path: _draw(path, strategy.rounds))
    first, count = strategy.rounds[0], int(config["rounds"])
    best = [one for one in strategy.rounds if one["kept"]][-1]["accuracy"]
    print(f"round {first['round']}: accuracy {first['accuracy']:.1%}; the best model of {count} rounds: {best:.1%}")
    if config["compare"] and not config["classes"]:
        messages = [Message(RecordDict({ARRAYS: initial}), node, "query.alone") for node in grid.get_node_ids()]
        replies = [one for one in grid.send_and_receive(messages, timeout=timeout * count) if not one.has_error()]
        alone = sorted(float(one.content.metric_records[METRICS]["accuracy"]) for one in replies)
        if alone:
            print(f"{len(alone)} boards alone: {alone[0]:.1%} to {alone[-1]:.1%}")
    print(f"results: {folder}", flush=True)


def _write(path: Path, write: Any) -> None:
    """Let `write` make a file, which gets its name when it is complete."""
    temporary = path.with_name(f"part_{path.name}")
    write(temporary)
    temporary.replace(path)


def _draw(path: Path, rounds: list[dict[str, Any]]) -> None:
    """Draw test accuracy over rounds, those that were dropped as circles."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3), layout="constrained")
    axes = figure.subplots()
    for is_kept, style in ((True, "o-"), (False, "o")):
        some = [one for one in rounds if one["kept"] is is_kept]
        values = [one["round"] for one in some], [100 * one["accuracy"] for one in some]
        label = "kept" if is_kept else "dropped"
        axes.plot(*values, style, color="C0", markerfacecolor="C0" if is_kept else "white", label=label)
    axes.set(xlabel="round", ylabel="test accuracy (%)")
    axes.legend()
    figure.savefig(path, dpi=150, format="png")
