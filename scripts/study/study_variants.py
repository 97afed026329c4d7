#!/usr/bin/env python
"""Registers what only the study compares: variants of elastic training, whose code is in `study_schemes`.

As a script it is main.py with these schemes as well: the same flags, such as --train_type elastic_training_greedy. A
run of such a scheme continues with this script too.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import utils
from elastic_trainer.errors import Stopped
from elastic_trainer.registry import SCHEMES, ImportanceEntry, Lazy, add_importance, elastic

SELECTORS = {
    "greedy": "importance per millisecond, one tensor after the other",
    "layers": "whole layers, as Accelerated ElasticTrainer does (IEEE Access 2025)",
    "published": "the paper's problem: times as in the table, T_q = 1000, the 2:1 rule for the forward pass",
}
VARIANTS = [f"elastic_training_{name}" for name in (*SELECTORS, "betti", "path")]


def register_variants() -> None:
    """Add the schemes. No TensorFlow is imported."""
    for name, what in SELECTORS.items():
        select = f"study_schemes:select_{name}"
        SCHEMES.add(f"elastic_training_{name}", elastic(name.capitalize(), what, select=select))
    betti, path = (ImportanceEntry(Lazy(f"study_schemes:{name}")) for name in ("Betti", "PathGain"))
    add_importance("betti", betti, "Betti numbers", "the topology of activations, as in AdaBet (arXiv 2510.03101)")
    add_importance("path", path, "Gain over many steps", "the gain over many steps of full training instead of one")


def run() -> None:
    import main

    register_variants()
    try:
        main.main()
    except Stopped as stopped:
        message = str(stopped).replace("main.py", "scripts/study/study_variants.py")
        raise Stopped(stopped.number, message) from None


if __name__ == "__main__":
    utils.run_cli(run)
