"""Train one network under one scheme: `python main.py --model_name … --dataset_name … --train_type …`.

Every option is declared in options.py; README lists them. A run leaves its results in logs/<run_name>/.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import utils
from elastic_trainer.cli import options
from elastic_trainer.runs.checkpoint import Checkpoints
from elastic_trainer.runs.folder import run_folder
from elastic_trainer.runs.power_record import add_external_energy
from elastic_trainer.settings import ELASTIC_TYPES
from utils import UserError


def main() -> None:
    args = options.parse_main()
    folder = args.logdir / (args.run_name or "")
    if args.resume:
        _check_unchanged(args, folder)
        if (folder / "summary.json").is_file():
            with run_folder(args.logdir, args.run_name, resume=True):
                _print_finished(args, folder)
            return
    utils.load_tensorflow()
    if args.evaluate is not None:
        from elastic_trainer.evaluation import evaluate

        model, dataset = evaluate.from_options(args)
        if args.export:
            from elastic_trainer.evaluation import export

            print(export.export_tflite(model, dataset, args.folder, str(args.evaluate)))
        return
    if args.deterministic:
        import tensorflow as tf

        tf.config.experimental.enable_op_determinism()

    import data
    import models
    import train
    from elastic_trainer.datasets.sources import count_classes
    from elastic_trainer.networks.memory import check_memory
    from elastic_trainer.networks.saved_model import load_model
    from elastic_trainer.networks.tensors import head_mask, tensor_names
    from elastic_trainer.runs.run_log import RunLog
    from elastic_trainer.selection.schemes import make_budget
    from elastic_trainer.selection.time_budget import RhoBudget
    from elastic_trainer.settings import Settings
    from elastic_trainer.timing.table import load_table

    args.num_classes = args.num_classes or count_classes(args.dataset_name, args.data_dir)
    if args.resume:
        _check_unchanged(args, folder)
    model = models.build_from_options(args)
    names = tensor_names(model)
    check_memory(model, args)
    table = None
    if args.train_type in ELASTIC_TYPES:
        table = load_table(args, names, [tuple(v.shape) for v in model.trainable_variables])
        if args.deadline is None:  # what cannot be kept is refused before images are read, which may take minutes
            RhoBudget(table, head_mask(model), args.rho)
    dataset = data.from_options(args, args.input_size)
    settings = Settings(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Settings)})
    budget = [] if table is None else [make_budget(model, dataset, settings, table)]
    with run_folder(args.logdir, args.run_name, args.overwrite, args.resume) as folder:
        if (folder / "summary.json").is_file():  # another process was faster
            _print_finished(args, folder)
            return
        print(
            f"{args.train_type} of {args.model_name} on {args.dataset_name}: {dataset.train_count} training and "
            f"{dataset.test_count} test images, {args.num_classes} classes; run folder {folder}"
        )
        with RunLog(folder, options.as_config(args), names) as run:
            summary = run.finish(getattr(train, args.train_type)(model, dataset, settings, run, *budget))
        _write_txt(args, folder, summary)
        _add_power(args, folder)
        print(_last_line(summary, args.deadline))
        if args.export:
            from elastic_trainer.evaluation import export

            if args.train_type == "prunetrain":
                model = load_model(folder / "best.keras", "--export")
            else:  # also for networks with layers of the user's own, which Keras cannot load
                model.load_weights(folder / "best.keras")
            print(export.export_tflite(model, dataset, folder, str(folder / "best.keras")))


def _write_txt(args: argparse.Namespace, folder: Path, summary: dict[str, Any]) -> None:
    if args.save_txt:
        hours, percent = summary["train_seconds"] / 3600, 100 * summary["best_accuracy"]
        utils.write_text(folder / f"{folder.name}.txt", f"{hours:.6e}\n{percent:.6e}\n")


def _add_power(args: argparse.Namespace, folder: Path) -> None:
    if args.power_csv is not None:
        utils.load_tensorflow()
        joules = add_external_energy(folder, args.power_csv)
        print(_read_json(folder / "summary.json")["energy_missing"] or f"energy of training: {joules:.6g} J")


def _print_finished(args: argparse.Namespace, folder: Path) -> None:
    """Say what came of the run in `folder`, and do what it may have been cut off from after its summary."""
    summary = _read_json(folder / "summary.json")
    Checkpoints(folder / "checkpoints").clear()
    _write_txt(args, folder, summary)
    _add_power(args, folder)
    print(f"{folder} is finished: {_last_line(summary, args.deadline)}")
    if args.export and not (folder / "model.tflite").exists():
        print(f"to export its best model: python main.py --evaluate {folder} --export {args.export}")


def _check_unchanged(args: argparse.Namespace, folder: Path) -> None:
    """Raises `UserError` if the run in `folder` was begun with other options."""
    if not (folder / "config.json").exists():
        return
    change = options.first_change(options.as_config(args), _read_json(folder / "config.json"), options.FREE_ON_RESUME)
    if change is not None:
        raise UserError(f"--resume: the run in {folder} was begun with {change}; give the same, or another --run_name")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--resume: {path} is damaged; begin anew with --overwrite") from error


def _last_line(summary: dict[str, Any], deadline: float | None) -> str:
    """What a person wants to know of a finished run."""
    seconds, step_ms, rho = summary["train_seconds"], summary["median_step_ms"], summary["rho_measured"]
    step = f", median step {step_ms:.1f} ms" if step_ms else ""
    if rho:
        asked = f"{summary['rho']:g}" if deadline is None else "what the deadline allows"
        step += (
            f"; {summary['time_over_full']:.2f} of full training's time as it would have run, its steps {rho:.2f} "
            f"(asked: {asked})"
        )
    if deadline is not None:
        step += f", {summary['elapsed_seconds']:.0f} s of the {deadline:.0f} s given"
        if summary["steps"] < summary["planned_steps"]:
            step += f", stopped at the deadline after step {summary['steps']} of {summary['planned_steps']}"
    return (
        f"accuracy {summary['final_accuracy']:.1%} (best {summary['best_accuracy']:.1%}), trained for "
        f"{seconds:.1f} s ({seconds / 3600:.2g} h), {summary['selection_percent']:.1f} % of it selecting and compiling"
        f"{step}"
    )


if __name__ == "__main__":
    utils.run_cli(main)
