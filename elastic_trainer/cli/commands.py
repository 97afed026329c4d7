"""The command lines of main.py and profiler.py as settings, complete and checked (no TensorFlow here).

The values of a run are those of its preset, then those that are given, then what follows from them: `complete`. What
stays None is measured, or counted, by `resolve`. A run that is resumed has the settings in its config.json.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from elastic_trainer.cli.checks import check, check_names, is_elastic, is_for_board, without_effect
from elastic_trainer.cli.exporters import EXPORTERS
from elastic_trainer.datasets.named import DATASETS
from elastic_trainer.runs.reader import (
    METRICS,
    SUMMARY,
    config_of_model,
    is_finished,
    is_run,
    read_settings,
    read_summary,
)
from elastic_trainer.selection.named import SCHEMES
from elastic_trainer.settings import (
    ALL_FLAGS,
    BEST_MODEL,
    MAIN_FLAGS,
    PRESETS,
    PROFILER_FLAGS,
    RATE_BATCH,
    TRAINED_IMAGES,
    TRAINING,
    Settings,
)
from elastic_trainer.settings.flags import OneLineParser, as_words, duration_text, parse_bool
from elastic_trainer.settings.network_names import (
    GLYPH_WEIGHTS,
    PACKAGED_NETWORK,
    SMALL_NETWORK,
    USUAL_SIZE,
    WIDTHS,
    is_custom_model,
    model_label,
)
from elastic_trainer.system.errors import UserError

NAMES: dict[str, Collection[str]] = {  # that flags take
    "dataset_name": DATASETS,
    "preset": PRESETS,
    "train_type": SCHEMES,
    "export": EXPORTERS,
}
NETWORK_FIELDS = ("model_name", "alpha", "input_size")
DEADLINE_EPOCHS = 1000  # at most, of a run that its deadline ends
MAX_NAME_BYTES = 230  # of a run's name; file systems allow 255, and files in the folder are named after it
_FROM_RUN = tuple(name for name, flag in ALL_FLAGS.items() if flag.evaluate == "run")
EPILOG = "The defaults are those of the preset paper. docs/flags.md explains more."
_COMMANDS = {
    "main.py": ("Train one network under one scheme.", MAIN_FLAGS),
    "profiler.py": ("Measure what each tensor of a network costs to train.", PROFILER_FLAGS),
}


def parser_of(command: str) -> OneLineParser:
    """The flags of main.py or profiler.py."""
    description, flags = _COMMANDS[command]
    others = {name: known for name, (_, known) in _COMMANDS.items() if name != command}
    parser = OneLineParser(others, prog=command, description=description, epilog=EPILOG)
    parser.add(flags, NAMES)
    return parser


def parse_main(words: Sequence[str] | None = None) -> Settings:
    """The command line of main.py, by default that of the process. Prints warnings of flags that have no effect.

    Raises `UserError` for wrong flags.
    """
    given = _given(words)
    if "evaluate" in given:
        return to_evaluate(given)
    settings = _training(given)
    for line in without_effect(given, settings):
        print(f"{Path(sys.argv[0]).name}: warning: {line}", file=sys.stderr)
    return settings


def parse_training(words: Sequence[str]) -> Settings:
    """A command line of main.py that trains: a new run, or one to resume. Raises `UserError` for wrong flags."""
    return _training(_given(words))


def _given(words: Sequence[str] | None) -> dict[str, Any]:
    parser = parser_of("main.py")
    text = "of the paper's scripts: a line says where the text is, which is always written"
    parser.add_argument("--save_txt", type=parse_bool, nargs="?", const=True, metavar="True|False", help=text)
    given = vars(parser.parse_args(words))
    if given.pop("save_txt"):
        print(f"--save_txt: accuracy and time are always text: {METRICS} and {SUMMARY} in the run's folder")
    return given


def _training(given: Mapping[str, Any]) -> Settings:
    if isinstance(given.get("resume"), Path):
        return _resumed(given["resume"], given)
    settings = _with_run_name(given, complete(given))
    return _resumed(settings.folder, given) if settings.resume and is_run(settings.folder) else settings


def parse_profiler(words: Sequence[str] | None = None) -> Settings:
    """The command line of profiler.py. Raises `UserError` for a value out of range."""
    return to_profile(vars(parser_of("profiler.py").parse_args(words)))


def to_profile(given: Mapping[str, Any]) -> Settings:
    """Settings of a network to profile: its times do not depend on weights, and nothing has to be downloaded."""
    settings = complete(given)
    return replace(
        settings,
        weights=given.get("weights", "none"),
        model_name=settings.model_name or PACKAGED_NETWORK,
        input_size=settings.input_size or USUAL_SIZE,
        batch_size=settings.batch_size or RATE_BATCH,
    )


# --- what follows from the flags --------------------------------------------------------------------------------------


def complete(given: Mapping[str, Any]) -> Settings:
    """The settings of a new run but its name, by the flags that are given; those are None which `resolve` chooses.

    Raises `UserError` for flags that do not suit each other.
    """
    dataset_name = given.get("dataset_name", Settings.dataset_name)
    preset = PRESETS[given.get("preset", DATASETS[dataset_name].preset)]
    settings = _with_network(given, replace(preset, **given))
    name, unset = settings.model_name, {*ALL_FLAGS} - {*given}
    follows: dict[str, Any] = {}
    if name == "vit":
        follows["optimizer"] = "adam"
    if name not in WIDTHS:
        follows["alpha"] = 1.0
    if is_custom_model(name):
        follows["weights"] = "none"
    elif (dataset_name, name, settings.alpha) == ("digits", "mobilenetv2", 0.35):
        follows["weights"] = str(GLYPH_WEIGHTS)
    settings = replace(settings, **{name: value for name, value in follows.items() if name in unset})
    if settings.train_type is None:
        is_random = settings.weights == "none" and not name.endswith(".keras")
        by_importance = is_random or settings.optimizer != "sgd"  # the lower layers of a random network must train
        settings = replace(settings, train_type="elastic_training" + ("" if by_importance else "_upper_part"))
    if preset.gradient_clipping > 0 and (settings.optimizer != "sgd" or settings.train_type == "prunetrain"):
        paper = PRESETS["paper"]
        settings = replace(settings, **{name: getattr(paper, name) for name in TRAINING if name not in given})
    if settings.augment is None:
        settings = replace(settings, augment="flip" if settings.deadline is None else "flip_crop")
    if settings.deadline is not None:
        changed: dict[str, Any] = {"rho": given.get("rho")}
        if SCHEMES[settings.train_type].importance is None:  # an upper part is selected once
            changed["interval"] = given.get("interval")
        if not {"num_epochs", "max_steps"} & {*given}:
            changed["num_epochs"] = DEADLINE_EPOCHS
        settings = replace(settings, **changed)
    check(given, settings)
    more: dict[str, Any] = {"save_model": _saves_model(given, settings)}
    if settings.deterministic:
        more["validation_share"] = 1.0  # else the clock decides
    if not is_elastic(settings):
        more["rho"] = None
    return replace(settings, **more)


def _with_network(given: Mapping[str, Any], settings: Settings) -> Settings:
    """With the network, its width and the size of its input, unless `resolve` chooses them by what they take here.

    Weights and widths are of one network; those of a run are of its own.
    """
    weights = given.get("weights", "imagenet")
    if settings.model_name is None and weights not in ("imagenet", "none"):
        before = config_of_model(Path(weights))
        settings = replace(
            settings, **{one: before[one] for one in NETWORK_FIELDS if one in before and one not in given}
        )
    is_small = weights != "imagenet" or "alpha" in given or settings.dataset_name == "digits" or is_for_board(settings)
    if settings.model_name is None and is_small:
        settings = replace(settings, model_name=SMALL_NETWORK)
    has_size = settings.model_name is None or settings.input_size is not None
    return settings if has_size else replace(settings, input_size=USUAL_SIZE)


def _saves_model(given: Mapping[str, Any], settings: Settings) -> bool:
    """Whether the best model is saved, which an export needs."""
    if settings.export is not None and not is_for_board(settings):
        if given.get("save_model") is False:
            raise UserError(f"--export {settings.export}: needs the best model; leave out --save_model False")
        return True
    return not is_custom_model(settings.model_name) if settings.save_model is None else settings.save_model


def _with_run_name(given: Mapping[str, Any], settings: Settings) -> Settings:
    """With the run's name: as given, else made from the settings; `auto` is the published default."""
    name = given.get("run_name", "auto")
    if name == "auto":
        network = [] if settings.model_name is None else [model_label(settings.model_name, settings.alpha)]
        name = "_".join([*network, settings.dataset_name, settings.train_type])
        name += "" if settings.rho is None else f"_rho{settings.rho:g}"
        name += "" if settings.deadline is None else f"_deadline{settings.deadline:g}"
    length = len(os.fsencode(name))
    if length > MAX_NAME_BYTES:
        raise UserError(f"--run_name {name[:20]}…: has {length} bytes; give at most {MAX_NAME_BYTES}")
    if name in ("", ".", "..") or not name.isprintable() or Path(name).name != name:
        raise UserError(f"--run_name: must be the name of a folder without its path, not '{name}'")
    if name in ("profiles", "images"):
        raise UserError(f"--run_name: '{name}' is reserved for files that several runs share; choose another name")
    return replace(settings, run_name=name)


# --- runs to resume, and models to evaluate ---------------------------------------------------------------------------


def _resumed(folder: Path, given: Mapping[str, Any]) -> Settings:
    """The settings of the run in `folder`, with those given now that may change.

    Raises `UserError` if there is no run, or a setting that may not change differs.
    """
    if not is_run(folder):
        raise UserError(f"--resume {folder}: contains no run (no config.json); give the folder of one, as logs/my_run")
    settings, free = read_settings(folder), dict[str, Any]()
    check_names(settings, NAMES)
    schedule = _new_schedule(folder, settings, given)
    for name, value in given.items():
        was = getattr(settings, name)
        if MAIN_FLAGS[name].is_free:
            free[name] = value
        elif name not in schedule and value != was and not (name == "rho" and not is_elastic(settings)):  # no budget
            started = "without it" if was is None else f"with {was}"
            raise UserError(
                f"--{name} {value}: the run in {folder} was started {started}; leave it out, or give another --run_name"
            )
    if free.get("save_model") is False and "export" not in free:
        free["export"] = None
    place = folder.absolute()
    free |= schedule
    settings = replace(settings, **{**free, "resume": True, "logdir": place.parent, "run_name": place.name})
    check({**free, "deterministic": settings.deterministic}, settings)
    return replace(settings, save_model=_saves_model(given, settings))


def _new_schedule(folder: Path, settings: Settings, given: Mapping[str, Any]) -> dict[str, Any]:
    """What changes in the run in `folder` if it is finished, and is given more epochs or a later deadline to go on.

    Raises `UserError` if it has that many epochs already, or has taken that long.
    """
    asked = {name: given[name] for name in ("num_epochs", "deadline") if name in given}
    is_same = all(value == getattr(settings, name) for name, value in asked.items())
    if is_same or not is_finished(folder) or not SCHEMES[settings.train_type].takes_steps:
        return {}
    done = read_summary(folder)
    epochs, deadline = asked.get("num_epochs", DEADLINE_EPOCHS), asked.get("deadline")
    if epochs <= done["epochs"]:
        raise UserError(f"--num_epochs {epochs}: the run in {folder} has {done['epochs']} already; give more")
    if deadline is not None and deadline <= done["elapsed_seconds"]:
        took = duration_text(done["elapsed_seconds"])
        raise UserError(f"--deadline {deadline:g}: the run in {folder} has taken {took} already; give more")
    start = {"from_epoch": done["epochs"], "from_step": done["steps"]}
    return {"num_epochs": epochs, "deadline": deadline, "max_steps": None, **start}


def to_evaluate(given: Mapping[str, Any]) -> Settings:
    """Settings of an evaluation; flags that are not given come from the run of the model.

    Raises `UserError` for flags that cannot be combined with `--evaluate`.
    """
    unfit = next((name for name in given if not MAIN_FLAGS[name].evaluate), None)
    if unfit:
        raise UserError(f"--{unfit}: cannot be combined with --evaluate, which trains nothing; leave it out")
    model = _model_file(given["evaluate"])
    run = read_settings(model.parent) if is_run(model.parent) else None
    values = dict[str, Any]()
    if run is not None:
        check_names(run, {"dataset_name": DATASETS})
        values = {name: getattr(run, name) for name in _FROM_RUN}
    if run is not None and given.get("dataset_name", run.dataset_name) != run.dataset_name:
        values["data_dir"] = None  # it belongs to the run's data set
    if "test_fraction" in given and (model.parent / TRAINED_IMAGES).is_file():
        raise UserError(
            f"--test_fraction {given['test_fraction']:g}: --evaluate tests a run on all images that it was not trained "
            "on; leave it out"
        )
    source = given.get("model_name")
    if source is not None and ".py:" not in source:
        raise UserError(
            f"--model_name {source}: --evaluate takes the network from its file; leave it out "
            "(FILE.py:FUNCTION may be given, for a network with custom layers)"
        )
    unknown = {"model_name": "", "input_size": None}
    settings = Settings(**{**unknown, **values, **given, "augment": "none", "evaluate": model})
    if is_for_board(settings):
        instead = f"cannot be combined with --evaluate; give --weights {model.parent} instead"
        raise UserError(f"--export {settings.export}: {instead}")
    return settings


def results_folder(settings: Settings) -> Path:
    """The folder for the results of `--evaluate`: that of the model's run, or one under `logdir`."""
    model = settings.evaluate
    assert model is not None, "--evaluate"
    if not is_run(model.parent):
        return settings.logdir / f"evaluated_{model.stem}"
    return model.parent if model.name == BEST_MODEL else model.parent / model.stem


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


# --- the profiler's command line --------------------------------------------------------------------------------------


def profiler_command(settings: Settings) -> str:
    """The command line that makes the timing table of these settings."""
    return shlex.join(["python", "profiler.py", *profiler_flags(settings)])


def profiler_flags(settings: Settings) -> list[str]:
    """The flags of profiler.py that make the timing table of these settings. Those that equal a default, too."""
    names = ["model_name", "dataset_name", "preset"]
    names += ["alpha"] if settings.model_name in WIDTHS else []
    names += ["input_size", "num_classes", "batch_size", "optimizer", "seed", "data_dir", "logdir"]
    flags = {name: getattr(settings, name) for name in names}
    return as_words({name: value for name, value in flags.items() if value is not None})
