"""Train one network under one scheme: `python main.py --model_name … --dataset_name … --train_type …`.

Every option is declared in options.py; README lists them. A run leaves its results in logs/<run_name>/.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import options
import utils

if TYPE_CHECKING:
    from timing_table import TimingTable


def main() -> None:
    args = options.parse_main()
    utils.load_tensorflow()
    import keras

    import data
    import models
    import timing_table
    import train

    keras.utils.set_random_seed(args.seed)
    args.num_classes = args.num_classes or data.count_classes(args.dataset_name, args.data_dir)
    model = models.build_model(
        args.model_name, args.input_size, args.num_classes, args.weights, args.alpha, args.augmentation, args.seed
    )
    names = models.tensor_names(model)
    elastic = args.train_type == "elastic_training"
    table = timing_table.load_table(args, names) if elastic else None
    if table:
        train.check_feasible(table, models.head_mask(model), args.rho)
    dataset = data.load(args.dataset_name, args.input_size, args.batch_size, args.seed, args.data_dir, args.num_classes)
    settings = train.Settings(**{field.name: getattr(args, field.name) for field in dataclasses.fields(train.Settings)})
    folder = utils.new_run_folder(args.logdir, args.run_name, args.overwrite)
    print(
        f"{args.train_type} of {args.model_name} on {args.dataset_name}: {dataset.train_count} training and "
        f"{dataset.test_count} test images, {args.num_classes} classes; run folder {folder}"
    )
    config = {
        name: value if isinstance(value, (int, float, type(None))) else str(value) for name, value in vars(args).items()
    }
    config["rho"] = args.rho if elastic else None
    with utils.RunLog(folder, config, names) as run:
        if table:
            results = train.elastic_training(model, dataset, settings, run, table)
        else:
            results = getattr(train, args.train_type)(model, dataset, settings, run)
        summary = run.finish(results)
    if args.save_txt:
        hours, percent = summary["train_seconds"] / 3600, 100 * summary["best_accuracy"]
        utils.write_text(folder / f"{folder.name}.txt", f"{hours:.6e}\n{percent:.6e}\n")
    print(_last_line(summary, table))


def _last_line(summary: dict[str, Any], table: TimingTable | None) -> str:
    step_ms = summary["median_step_ms"]
    step = f", median step {step_ms:.1f} ms" if step_ms else ""
    if step_ms and table:
        step += f" = {step_ms / table.full_step_ms:.2f} of the full one profiled (asked: {summary['rho']:g})"
    return (
        f"accuracy {summary['final_accuracy']:.1%} (best {summary['best_accuracy']:.1%}), trained for "
        f"{summary['train_seconds']:.1f} s, {summary['selection_seconds']:.1f} s of it selecting and compiling{step}"
    )


if __name__ == "__main__":
    utils.run_cli(main)
