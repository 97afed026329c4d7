"""Schemes of elastic training that differ in the solver's T_q, for figure 13.

They are added as any program can add a scheme. Run as a script, this is main.py with them.
"""

from __future__ import annotations

import runpy
from functools import partial
from typing import Any

import plotting  # first: it sets the import path

from elastic_trainer.selection.named import SCHEMES, elastic

RESOLUTIONS = (10, 100, 1_000, 10_000, 100_000)
PREFIX = "elastic_training_tq"
SCRIPT = "scripts/figures/resolutions.py"


def _select(*args: Any, **more: Any) -> Any:
    from elastic_trainer.selection.select import select_tensors

    return select_tensors(*args, **more)


for T_q in RESOLUTIONS:
    select = partial(_select, time_resolution=T_q)
    SCHEMES[f"{PREFIX}{T_q}"] = elastic("ElasticTrainer", f"as elastic_training, with T_q {T_q}", select=select)

if __name__ == "__main__":
    runpy.run_path(str(plotting.ROOT / "main.py"), run_name="__main__")
