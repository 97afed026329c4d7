"""The command line of fleet.py (no TensorFlow here)."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from elastic_trainer.cli.commands import TrainCommand, check_data_options
from elastic_trainer.cli.flags import add_flags, main_parser, profiler_parser
from elastic_trainer.cli.parser import OneLineParser, as_words
from elastic_trainer.cli.train_command import parse_training
from elastic_trainer.datasets.layout import class_name
from elastic_trainer.errors import UserError
from elastic_trainer.extensions.fleet.settings import (
    BOARD_FLAGS,
    FLEET_FLAGS,
    SIMULATION_FLAGS,
    BoardSettings,
    FleetSettings,
    SimulationSettings,
)
from elastic_trainer.networks.names import WIDTHS, is_custom_model
from elastic_trainer.options import Flag, from_options
from elastic_trainer.runs.config import FREE_ON_RESUME, first_change
from elastic_trainer.runs.reader import is_run, read_config, started_with
from elastic_trainer.settings import MAIN_FLAGS

# The flags of main.py that a server and a board have. A board gets the network and the recipe from its server.
_PHOTOS = ("dataset_name", "data_dir", "test_fraction", "skip_broken", "image_memory")
_SERVER = (
    *("model_name", "input_size", "num_classes", "batch_size", "weights", "alpha", "optimizer", "seed"),
    *_PHOTOS,
    *("augment", "learning_rate", "weight_decay", "gradient_clipping", "recipe"),
    *("logdir", "run_name", "resume", "overwrite"),
)
_BOARD = ("model_name", *_PHOTOS, "memory", "micro_batch", "logdir")
_SENT = ("model_name", "input_size", "batch_size", "optimizer", "augment", "weight_decay", "gradient_clipping", "seed")


def flags_of_command(name: str) -> dict[str, Flag]:
    """The flags of `fleet.py serve`, `fleet.py join`, or `fleet.py simulate`."""
    rounds = {name: FLEET_FLAGS[name] for name in ("rounds", "round_seconds", "changes")}
    main, own = {
        "serve": (_SERVER, FLEET_FLAGS),
        "join": (_BOARD, BOARD_FLAGS),
        "simulate": ([name for name in _SERVER if name != "resume"], {**SIMULATION_FLAGS, **rounds}),
    }[name]
    return {**own, **{each: MAIN_FLAGS[each] for each in main}}


@dataclass(frozen=True)
class ServeCommand:
    """One server: `fleet.py serve`.

    Attributes:
        class_names: as given; None: those of its data set.
        config: the options as config.json keeps them.
        simulation: the boards of `fleet.py simulate`; None: real ones.
    """

    fleet: FleetSettings
    training: TrainCommand
    class_names: list[str] | None
    config: dict[str, Any]
    simulation: SimulationSettings | None = None

    @property
    def has_photos(self) -> bool:
        """Whether the server tests the models on photos of its own."""
        return self.class_names is None


@dataclass(frozen=True)
class JoinCommand:
    """One board: `fleet.py join`.

    Attributes:
        words: of the command line of main.py, those that the board adds to its server's.
        custom: --model_name, as given.
    """

    board: BoardSettings
    words: list[str]
    custom: str | None
    logdir: Path

    @property
    def name(self) -> str:
        """Of the board."""
        return self.board.name or platform.node() or "board"


def parse_fleet(arguments: Sequence[str] | None = None) -> ServeCommand | JoinCommand:
    """The command line of fleet.py. Raises `UserError` for wrong flags."""
    given = [*(sys.argv[1:] if arguments is None else arguments)]
    args = fleet_parser().parse_args(given)
    return _join(given[1:], args) if args.command == "join" else _serve(given, args)


def fleet_parser() -> OneLineParser:
    """The flags of fleet.py."""
    description = "One model from many boards, whose photos stay where they are."
    parser = OneLineParser([main_parser, profiler_parser], prog="fleet.py", description=description)
    commands = parser.add_subparsers(dest="command", required=True, metavar="serve|join|simulate")
    texts = {
        "serve": "average what the boards learn",
        "join": "train on this board for a server",
        "simulate": "many boards with made-up speeds in this process, to plan a fleet",
    }
    for name, text in texts.items():
        others = [partial(_parser_of, other) for other in texts if other != name]
        own = commands.add_parser(name, help=text, siblings=[*others, main_parser, profiler_parser])
        add_flags(own, flags_of_command(name))
    return parser


def _parser_of(name: str) -> OneLineParser:
    """The flags of one command of fleet.py."""
    parser = OneLineParser(prog=f"fleet.py {name}")
    add_flags(parser, flags_of_command(name))
    return parser


def _typed(args: argparse.Namespace, words: Sequence[str], names: Sequence[str]) -> dict[str, Any]:
    """The options of main.py with these `names` that are among the `words`, even if they equal a default."""
    given = _parser_of(args.command).given(words)
    typed = {name: getattr(args, name) for name in given if name in names}
    if "memory" in typed:
        typed["memory"] = f"{typed['memory']}M"
    return typed


def _serve(given: list[str], args: argparse.Namespace) -> ServeCommand:
    is_simulated, words = args.command == "simulate", given[1:]
    args.resume, args.class_names = getattr(args, "resume", False), getattr(args, "class_names", None)
    if isinstance(args.resume, Path):
        folder = args.resume
        before = started_with(folder)
        if before[:1] != ["serve"]:
            how = "a simulation starts again" if before[:1] == ["simulate"] else "continue it with main.py"
            raise UserError(f"--resume {folder}: is not the run of a fleet; {how}")
        place = as_words({"logdir": folder.absolute().parent, "run_name": folder.absolute().name, "overwrite": False})
        words = [*before[1:], *words, *place]
        args = fleet_parser().parse_args(["serve", *words])
        given = [word for word in before if word != "--resume"]
        args.resume = True
    names = [class_name(name) for name in args.class_names.split(",")] if args.class_names else None
    if names is not None:
        _check_classes(names, args)
    typed = _typed(args, words, [name for name in _SERVER if name not in ("resume", "overwrite")])
    typed |= {} if names is None else {"num_classes": len(names)}
    run_name = f"{'simulated' if is_simulated else 'fleet'}_{args.dataset_name}"
    chosen = {"recipe": "robust", "run_name": run_name, "train_type": "elastic_training_upper_part", "save_model": True}
    switches = [f"--{name}" for name in ("resume", "overwrite") if getattr(args, name)]
    training = parse_training([*as_words(typed), *switches], as_words(chosen))
    fleet = from_options(FleetSettings, vars(args))
    simulation = from_options(SimulationSettings, vars(args)) if is_simulated else None
    if simulation is not None:
        fleet = replace(fleet, boards=simulation.clients, grace=1e6)
    options = {**vars(fleet), **(vars(simulation) if simulation else {})}
    own = {name: value if isinstance(value, int | float | None) else str(value) for name, value in options.items()}
    command = ServeCommand(fleet, training, names, {**training.config, **own, "command": given}, simulation)
    if training.run.resume and is_run(training.run.folder):
        _check_unchanged(command)
    return command


def _check_unchanged(command: ServeCommand) -> None:
    """Raise `UserError` if the fleet to continue was started with other options."""
    folder = command.training.run.folder
    free = FREE_ON_RESUME.union(name for name, flag in FLEET_FLAGS.items() if flag.is_free)
    change = first_change(command.config, read_config(folder), free)
    if change is not None:
        raise UserError(
            f"--resume: the fleet in {folder} was started with {change}; use the same, or give another --run_name"
        )


def _check_classes(names: list[str], args: argparse.Namespace) -> None:
    if len(names) < 2 or len({*names}) < len(names) or "" in names:
        raise UserError(f"--class_names {args.class_names}: must be at least two different names, such as cat,dog")
    if args.data_dir is not None:
        raise UserError("--class_names: the folders in --data_dir name the classes; leave one of them out")
    if args.num_classes not in (None, len(names)):
        raise UserError(f"--num_classes {args.num_classes}: --class_names has {len(names)} names; leave it out")


def sent_words(training: TrainCommand, classes: int) -> list[str]:
    """The words of the command line by which a board builds the network of `training`."""
    options = {**vars(training.network), **vars(training.data), **vars(training.training)}
    flags = {name: options[name] for name in _SENT}
    flags["gradient_clipping"] = flags["gradient_clipping"] or 0
    if training.network.model_name in WIDTHS:
        flags["alpha"] = training.network.alpha
    return as_words({**flags, "num_classes": classes, "recipe": training.run.recipe})


def _join(given: list[str], args: argparse.Namespace) -> JoinCommand:
    typed = _typed(args, given, [name for name in _BOARD if name != "model_name"])
    custom = args.model_name if is_custom_model(args.model_name) else None
    if args.model_name is not None and custom is None:
        raise UserError(f"--model_name {args.model_name}: the server says which network; give FILE.py:FUNCTION alone")
    if args.data_dir is not None and "dataset_name" not in typed:
        typed["dataset_name"] = args.dataset_name = "image_folder"
    check_data_options(args)
    return JoinCommand(from_options(BoardSettings, vars(args)), as_words(typed), custom, args.logdir)


def board_command(command: JoinCommand, sent: Sequence[str]) -> TrainCommand:
    """The run of main.py by which a board trains: its own words, and those that its server sent.

    Raises:
        UserError: the server's words are none of those that it may send, or do not suit this board.
    """
    flags = dict(zip(sent[::2], sent[1::2], strict=False))
    allowed = {f"--{name}" for name in (*_SENT, "alpha", "num_classes", "recipe")}
    if len(sent) % 2 or not {*flags} <= allowed or len(flags) * 2 != len(sent):
        raise UserError("the server asks for options that this board does not know; use the same version of both")
    if is_custom_model(flags["--model_name"]):
        if command.custom is None:
            raise UserError(
                f"the server trains {Path(flags['--model_name']).name}; give this board its own copy with "
                "--model_name FILE.py:FUNCTION"
            )
        flags["--model_name"] = command.custom
    words = [word for pair in flags.items() for word in pair]
    fixed = {"weights": "none", "train_type": "elastic_training_upper_part", "rho": 1, "save_model": False}
    return parse_training([*words, *command.words, *as_words(fixed)])
