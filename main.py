"""Train one network under one scheme: `python main.py --model_name … --dataset_name … --train_type …`.

Every option is declared in options.py; README lists them. A run leaves its results in logs/<run_name>/.
"""

from __future__ import annotations

import options
import utils
from utils import UserError


def main() -> None:
    args = options.parse_main()
    utils.load_tensorflow()
    import keras

    import data
    import models
    import profiler
    import train

    keras.utils.set_random_seed(args.seed)
    dataset = data.load(args.dataset_name, args.input_size, args.batch_size, args.seed, args.data_dir, args.num_classes)
    args.num_classes = args.num_classes or dataset.num_classes
    model = models.build_model(
        args.model_name, args.input_size, args.num_classes, args.weights, args.alpha, args.augmentation, args.seed
    )
    names = models.tensor_names(model)
    elastic = args.train_type == "elastic_training"
    try:
        table = profiler.load_table(args, names)
    except UserError:
        if elastic:
            raise
        table = None  # the other schemes need none; without it the time over full is not known
    if elastic:
        train.check_feasible(table, models.head_mask(model), args.rho)

    settings = train.Settings(
        **{name: getattr(args, name) for name in train.Settings.__dataclass_fields__},
    )
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
        if elastic:
            results = train.elastic_training(model, dataset, settings, run, table)
        else:
            results = getattr(train, args.train_type)(model, dataset, settings, run)
        summary = run.finish(results)
    if args.save_txt:
        hours, percent = summary["train_seconds"] / 3600, 100 * summary["best_accuracy"]
        utils.write_text(folder / f"{folder.name}.txt", f"{hours:.6e}\n{percent:.6e}\n")
    print(_last_line(summary, table.full_step_ms if table else None))


def _last_line(summary: dict, full_step_ms: float | None) -> str:
    selection_percent = 100 * summary["selection_seconds"] / summary["train_seconds"]
    step = ""
    if summary["median_step_ms"] is not None:
        step = f", step {summary['median_step_ms']:.1f} ms"
        if full_step_ms:
            step += f" = {summary['median_step_ms'] / full_step_ms:.2f} of a full one when profiled"
    return (
        f"accuracy {summary['final_accuracy']:.1%} (best {summary['best_accuracy']:.1%}), trained "
        f"{summary['train_seconds']:.1f} s, of which selecting {selection_percent:.1f} %{step}"
    )


if __name__ == "__main__":
    utils.run_cli(main)
