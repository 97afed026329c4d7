"""Train one network under one scheme: `python main.py --model_name … --dataset_name … --train_type …`.

Every option is declared in options.py; README lists them. A run leaves its results in logs/<run_name>/.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import options
import utils


def main() -> None:
    args = options.parse_main()
    utils.load_tensorflow()
    if args.evaluate is not None:
        import evaluate

        evaluate.from_options(args)
        return

    import data
    import models
    import timing_table
    import train

    args.num_classes = args.num_classes or data.count_classes(args.dataset_name, args.data_dir)
    model = models.build_from_options(args)
    names = models.tensor_names(model)
    elastic = args.train_type == "elastic_training"
    table = (
        timing_table.load_table(args, names, [tuple(v.shape) for v in model.trainable_variables]) if elastic else None
    )
    dataset = data.load(args.dataset_name, args.input_size, args.batch_size, args.seed, args.data_dir, args.num_classes)
    settings = train.Settings(**{field.name: getattr(args, field.name) for field in dataclasses.fields(train.Settings)})
    budget = train.make_budget(model, dataset, settings, table) if table else None
    folder = utils.new_run_folder(args.logdir, args.run_name, args.overwrite)
    print(
        f"{args.train_type} of {args.model_name} on {args.dataset_name}: {dataset.train_count} training and "
        f"{dataset.test_count} test images, {args.num_classes} classes; run folder {folder}"
    )
    config = {
        name: value if isinstance(value, (int, float, type(None))) else str(value) for name, value in vars(args).items()
    }
    config["rho"] = args.rho if elastic and args.deadline is None else None
    with utils.RunLog(folder, config, names) as run:
        if budget:
            results = train.elastic_training(model, dataset, settings, run, budget)
        else:
            results = getattr(train, args.train_type)(model, dataset, settings, run)
        summary = run.finish(results)
    if args.save_txt:
        hours, percent = summary["train_seconds"] / 3600, 100 * summary["best_accuracy"]
        utils.write_text(folder / f"{folder.name}.txt", f"{hours:.6e}\n{percent:.6e}\n")
    print(_last_line(summary, args.deadline))
    if args.export:
        import export

        model.load_weights(folder / "best.keras")
        print(export.export_tflite(model, dataset, folder, str(folder / "best.keras")))


def _last_line(summary: dict[str, Any], deadline: float | None) -> str:
    step_ms, rho = summary["median_step_ms"], summary["rho_measured"]
    step = f", median step {step_ms:.1f} ms" if step_ms else ""
    if rho:
        asked = f"{summary['rho']:g}" if deadline is None else "what the deadline allows"
        step += f", steps {rho:.2f} of full training's as it would have run (asked: {asked})"
    if deadline is not None:
        step += f", {summary['elapsed_seconds']:.0f} s of the {deadline:.0f} s given"
        if summary["steps"] < summary["planned_steps"]:
            step += f", stopped at the deadline after step {summary['steps']} of {summary['planned_steps']}"
    return (
        f"accuracy {summary['final_accuracy']:.1%} (best {summary['best_accuracy']:.1%}), trained for "
        f"{summary['train_seconds']:.1f} s, {summary['selection_seconds']:.1f} s of it selecting and compiling{step}"
    )


if __name__ == "__main__":
    utils.run_cli(main)
