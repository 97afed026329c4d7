#!/usr/bin/env python
"""Make records/README.md, the index of the records of measurements.

A record is the last line that a benchmark prints, in a file <benchmark>_<what>[_<number>].json.

    python scripts/benchmarks/records_page.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import common  # noqa: F401  # first: it sets the import path

import utils
from elastic_trainer.settings.flags import OneLineParser
from elastic_trainer.settings.network_names import model_label
from elastic_trainer.system.files import write_text

RECORDS = Path(__file__).with_name("records")
HEAD = """# Records of the benchmarks

Made from the records by `scripts/benchmarks/records_page.py`. What they mean is in `docs/`. The log there has the
numbers of earlier series; their records are in this repository's commits 81e50d2 and 7c392c8.

| record | network | what | result | rounds | commit |
|---|---|---|---|---|---|
"""


RESULTS = {  # what the index shows of a record, by the start of its name
    "board": ("step_over_tensorflow",),
    "examples": (),
    "fuzz": ("examples", "failed"),
    "long_run": ("growth_percent",),
    "pytorch": ("over_best_pytorch", "full_over_keras"),
    "recorded_board": (),
    "rho": ("rho",),
    "solver": ("recursions_agree", "all_within_budget"),
    "step": ("full_over_keras", "full_over_best_torch"),
    "time_model": ("median_error_percent", "p95_error_percent"),
    "torture_resume": ("kills", "kept"),
}


def _shown(value: Any) -> str:
    """A value of a record in a cell: numbers to three digits; of each rho, the ratio of steps."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(one)}" for name, one in value.items())
    if isinstance(value, list):
        return ", ".join(f"{one['asked']:g}: {one['measured']:.3f}" for one in value)
    return str(value) if isinstance(value, bool) else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def page() -> str:
    """The index: a row a record, in the order of their names."""
    rows = []
    for path in sorted(RECORDS.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        keys = next(keys for name, keys in RESULTS.items() if path.stem.startswith(name))
        result = "; ".join(f"{key} {_shown(record[key])}" for key in keys if key in record).replace("_", " ")
        network = model_label(record["model_name"], record["alpha"]) if "model_name" in record else ""
        pixels = f" {record['input_size']}×{record['input_size']}, batch {record['batch_size']}" if network else ""
        rounds, commit = str(record.get("rounds", "")), record["environment"].get("commit") or ""
        cells = [path.name, network + pixels, record.get("note", ""), result, rounds, commit]
        rows.append(f"| {' | '.join(cells)} |\n")
    return HEAD + "".join(rows)


def main() -> None:
    OneLineParser(prog="records_page.py", description=__doc__).parse_args()
    write_text(RECORDS / "README.md", page())


if __name__ == "__main__":
    utils.run_cli(main)
