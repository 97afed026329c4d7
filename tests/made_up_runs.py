"""Finished runs that were never trained: what the figures read of them, with numbers that are easy to check."""

import csv
from pathlib import Path

import numpy as np

from elastic_trainer.system.files import write_csv, write_record
from elastic_trainer.system.machine import environment

EPOCHS = 4


def rows_of(stem):
    """The rows of a figure's CSV file; its pictures must exist, too."""
    for ending in ("pdf", "png"):
        assert Path(f"{stem}.{ending}").stat().st_size > 1000
    with Path(f"{stem}.csv").open(newline="", encoding="utf-8") as file:
        return [*csv.DictReader(file)]


def made_up_run(folder, train_type="full_training", rho=None, seed=0, scale=1.0, **config):
    """Write the folder of a run of `EPOCHS` epochs; each has 10 s of training, 2 s of validation and 0.1 more accuracy.

    Args:
        folder: of the run.
        train_type, rho, seed: of the run.
        scale: factor of times, accuracies, FLOPs and memory.
        config: further options of config.json.
    """
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
        "steps": EPOCHS * 100,
        "best_accuracy": min(0.4 * scale, 1.0),
        "final_accuracy": min(0.4 * scale, 1.0),
        "train_seconds": 40 * scale,
        "training_spans": [[0.0, 40.0 * scale]],
        "validation_seconds": 2 * EPOCHS,
        "selection_seconds": 4.0,
        "median_step_ms": 100 * scale,
        "train_flops": 1e13 * scale,
        "peak_memory_mb": 1000 * scale,
        "energy_joules": None,
    }
    write_record(folder / "config.json", settings)
    write_record(folder / "summary.json", summary)
    write_csv(folder / "metrics.csv", [*rows[0]], [[*row.values()] for row in rows])
    # Importance turns a little each epoch, so similarity falls with distance.
    chosen, columns = [], ["epoch", "step", "name", "importance", "chosen"]
    for epoch in range(EPOCHS):
        angles = 0.3 * epoch + np.array([0, np.pi / 2])
        chosen += [(epoch, epoch, f"t{k}", np.cos(angle), int(k >= epoch % 2)) for k, angle in enumerate(angles)]
    write_csv(folder / "selections.csv", columns, chosen)
    return folder
