#!/usr/bin/env python
"""Make records/README.md, the index of the records of measurements, from them.

A record is the last line that a benchmark prints, in a file <benchmark>_<what>[_<number>].json; --note says in it what
distinguishes it.

    python scripts/benchmarks/records_page.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common  # noqa: F401  # first: it sets the import path

import utils
from elastic_trainer.cli.parser import OneLineParser
from elastic_trainer.files import write_text
from elastic_trainer.networks.names import model_label

RECORDS = Path(__file__).with_name("records")
HEAD = """# Records of the benchmarks

Made from the records by `scripts/benchmarks/records_page.py`. What they mean is in `docs/`; the numbers of earlier
series, whose records are in the history of this repository, are in its log.

| record | network | what | result | rounds | processor |
|---|---|---|---|---|---|
"""


Record = dict[str, Any]


def _time_model(record: Record) -> str:
    return (
        f"error at one speed {record['median_error_percent']:.1f} %, 95th centile {record['p95_error_percent']:.1f} %"
    )


def _rho(record: Record) -> str:
    return ", ".join(f"{one['asked']:g}: {one['measured']:.3f}" for one in record["rho"])


def _fit(record: Record) -> str:
    return "; ".join(f"{name} {_rho({'rho': of})}" for name, of in record["networks"].items())


def _examples(record: Record) -> str:
    return ", ".join(f"{name}: {one['ratio']:.2f}" for name, one in record["examples"].items())


def _input(record: Record) -> str:
    return ", ".join(f"{name}: {speed:.0f} images/s" for name, speed in record["images_per_second"].items())


def _mixed_precision(record: Record) -> str:
    return f"full step {record['speedup']['full_step']:.2f} times faster in {record['policy']}"


def _prunetrain(record: Record) -> str:
    row = record["pruned"][-1]
    return f"{row['removed_share']:.0%} of the channels removed: step {row['step_ratio']:.2f} of the full network's"


def _step(record: Record) -> str:
    full = record["step_ms"]["full"]
    return f"full step {full['folded']:.0f} ms, Keras' {full['keras']:.0f} ms"


def _throttle(record: Record) -> str:
    halves = record["rho_in_the_undisturbed_half"], record["rho_in_the_disturbed_half"]
    return f"{record['rho']:g}: {halves[0]:.2f} undisturbed, {halves[1]:.2f} disturbed"


def _solver(record: Record) -> str:
    own = {run["tensors"]: run["solve_ms"] for run in record["runs"] if run["automatic"]}
    return f"automatic T_q: {own[214]:.0f} ms for 214 tensors, {own[5000]:.0f} ms for 5,000"


def _torture_resume(record: Record) -> str:
    return f"{record['kills']} kills, all equal: {all(record['held'].values())}"


RESULTS: dict[str, Callable[[Record], str]] = {  # by the start of a record's name
    "examples": _examples,
    "fit": _fit,
    "input": _input,
    "mixed_precision": _mixed_precision,
    "prunetrain": _prunetrain,
    "rho": _rho,
    "solver": _solver,
    "step": _step,
    "throttle": _throttle,
    "time_model": _time_model,
    "torture_resume": _torture_resume,
}


def page() -> str:
    """The index: a row a record, in the order of their names."""
    rows = []
    for path in sorted(RECORDS.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        result = next(of for name, of in RESULTS.items() if path.stem.startswith(name))(record)
        network = model_label(record["model_name"], record["alpha"]) if "model_name" in record else ""
        pixels = f" {record['input_size']}×{record['input_size']}, batch {record['batch_size']}" if network else ""
        environment = record["environment"]
        machine = environment["processor"] + (f", {environment['commit']}" if environment.get("commit") else "")
        cells = [path.name, network + pixels, record.get("note", ""), result, str(record.get("rounds", "")), machine]
        rows.append(f"| {' | '.join(cells)} |\n")
    return HEAD + "".join(rows)


def main() -> None:
    OneLineParser(prog="records_page.py", description=__doc__).parse_args()
    write_text(RECORDS / "README.md", page())


if __name__ == "__main__":
    utils.run_cli(main)
