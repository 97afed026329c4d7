"""The command line of `main.py --evaluate`: options that are not given come from the run of the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from elastic_trainer.cli.commands import EvaluateCommand
from elastic_trainer.cli.flags import main_parser
from elastic_trainer.errors import UserError
from elastic_trainer.options import from_options
from elastic_trainer.runs.reader import is_run, read_config
from elastic_trainer.settings import BEST_MODEL, MAIN_FLAGS, TRAINED_IMAGES, DataSettings, defaults_of

# Options that come from the run's config.json if they are not given.
_FROM_RUN = tuple(name for name, flag in MAIN_FLAGS.items() if flag.evaluate == "run")


def parse_evaluation(words: Sequence[str]) -> EvaluateCommand:
    """A command line of main.py with `--evaluate`. Raises `UserError` for options that cannot be combined with it."""
    parser = main_parser()
    given, args = parser.given(words), parser.parse_args(words)
    unfit = next((name for name in given if not MAIN_FLAGS[name].evaluate), None)
    if unfit:
        raise UserError(f"--{unfit}: cannot be combined with --evaluate, which trains nothing; leave it out")
    model = _model_file(args.evaluate)
    config = read_config(model.parent) if is_run(model.parent) else {}
    of_run = {name: config.get(name) for name in _FROM_RUN}
    if "dataset_name" in given and args.dataset_name != of_run["dataset_name"]:
        of_run["data_dir"] = of_run["num_classes"] = None  # they belong to the run's data set
    if "test_fraction" in given and (model.parent / TRAINED_IMAGES).is_file():
        raise UserError(
            f"--test_fraction {args.test_fraction:g}: --evaluate tests a run on all images that it was not trained on; "
            "leave it out"
        )
    source = of_run.pop("model_name") or ""  # no default of the parser: its file may be gone
    if "model_name" in given:
        source = args.model_name
        if ".py:" not in source:
            raise UserError(
                f"--model_name {source}: --evaluate takes the network from its file; leave it out "
                "(FILE.py:FUNCTION may be given, for a network with custom layers)"
            )
    parser.set_defaults(**{name: value for name, value in of_run.items() if value is not None}, augment="none")
    args = parser.parse_args(words)
    return EvaluateCommand(
        model=model,
        folder=_result_folder(model, args.logdir, is_of_run=bool(config)),
        data=from_options(DataSettings, vars(args)),
        model_name=source if ".py:" in source else None,
        input_size=args.input_size,
        num_classes=args.num_classes,
        batch_size=args.batch_size or defaults_of(args.dataset_name)["batch_size"],
        seed=args.seed,
        export=args.export,
        class_names=(config.get("images") or {}).get("class_names"),
    )


def _result_folder(model: Path, logdir: Path, is_of_run: bool) -> Path:
    if not is_of_run:
        return logdir / f"evaluated_{model.stem}"
    return model.parent if model.stem == "best" else model.parent / model.stem


def _model_file(path: Path) -> Path:
    if path.is_dir():
        if not (path / BEST_MODEL).is_file():
            raise UserError(f"--evaluate {path}: contains no best.keras; runs save it with --save_model or --export")
        return path / BEST_MODEL
    if path.suffix != ".keras":
        raise UserError(f"--evaluate {path}: must be the folder of a run or a file that ends in .keras")
    if not path.is_file():
        raise UserError(f"--evaluate {path}: there is no such file")
    return path
