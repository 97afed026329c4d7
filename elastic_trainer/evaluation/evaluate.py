"""`python main.py --evaluate logs/run`: load a trained model, predict the test images, write the class report."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import keras

from elastic_trainer.datasets.image_data import ImageData
from elastic_trainer.evaluation.class_report import write_report
from elastic_trainer.evaluation.loading import load
from elastic_trainer.evaluation.predictions import predict

if TYPE_CHECKING:
    import argparse


def from_options(args: argparse.Namespace) -> tuple[keras.Model, ImageData]:
    """Evaluate as the options of `options.parse_main` with `--evaluate` ask.

    Returns:
        The model and the data set that were evaluated, as `load` returns them.

    Raises:
        UserError: the model cannot be loaded or does not fit the data set, or a file cannot be written.
    """
    model, dataset = load(args)
    print(f"{args.evaluate} on {dataset.name}: {dataset.test_count} test images, {dataset.num_classes} classes")
    start = time.perf_counter()
    predictions = predict(model, dataset)
    record = {
        "model": str(args.evaluate),
        "dataset_name": dataset.name,
        "data_dir": str(args.data_dir) if args.data_dir else None,
        "input_size": dataset.input_size,
        "outputs": model.output_shape[-1],
        "seconds": time.perf_counter() - start,
    }
    print(write_report(predictions, dataset.class_names, args.folder / "evaluation", record))
    return model, dataset
