"""Registers what only the study compares: variants of elastic training, whose code is in `study_schemes`."""

from __future__ import annotations

from elastic_trainer.registry import SCHEMES, ImportanceEntry, Lazy, add_importance, elastic


def register_variants() -> None:
    """Add the schemes. No TensorFlow is imported."""
    for name, what in (
        ("greedy", "importance per millisecond, one tensor after the other"),
        ("layers", "whole layers, as Accelerated ElasticTrainer does (IEEE Access 2025)"),
        ("published", "the paper's problem: times as in the table, T_q = 1000, the 2:1 rule for the forward pass"),
    ):
        select = f"study_schemes:select_{name}"
        SCHEMES.add(f"elastic_training_{name}", elastic(name.capitalize(), what, select=select))
    betti, path = (ImportanceEntry(Lazy(f"study_schemes:{name}")) for name in ("Betti", "PathGain"))
    add_importance("betti", betti, "Betti numbers", "the topology of activations, as in AdaBet (arXiv 2510.03101)")
    add_importance("path", path, "Gain over many steps", "the gain over many steps of full training instead of one")
