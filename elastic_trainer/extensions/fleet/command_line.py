"""The command line of fleet.py (no TensorFlow here)."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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

SCHEME = "elastic_training_upper_part"
_MAIN_FLAGS = {**MAIN_FLAGS, "dataset_name": replace(MAIN_FLAGS["dataset_name"], default="digits")}
_PHOTOS = ("dataset_name", "data_dir", "test_fraction", "skip_broken", "image_memory")
_SERVER = (
    *("model_name", "input_size", "num_classes", "batch_size", "weights", "alpha", "optimizer", "seed"),
    *_PHOTOS,
    *("augment", "learning_rate", "weight_decay", "gradient_clipping", "recipe", "logdir", "run_name", "overwrite"),
)
_SENT = ("model_name", "input_size", "batch_size", "optimizer", "augment", "weight_decay", "gradient_clipping", "seed")


class _Command(NamedTuple):
    """A command of fleet.py: its help, its own flags, and those of main.py that it has, too."""

    help: str
    own: dict[str, Flag]
    main: tuple[str, ...]

    @property
    def flags(self) -> dict[str, Flag]:
        return {**self.own, **{name: _MAIN_FLAGS[name] for name in self.main}}


COMMANDS = {  # a board gets the network and the recipe from its server
    "serve": _Command("average what the boards learn", FLEET_FLAGS, (*_SERVER, "resume")),
    "join": _Command(
        "train on this board for a server", BOARD_FLAGS, ("model_name", *_PHOTOS, "memory", "micro_batch", "logdir")
    ),
    "simulate": _Command(
        "many boards with chosen speeds in this process, to plan a fleet",
        {**SIMULATION_FLAGS, **{name: FLEET_FLAGS[name] for name in ("rounds", "round_seconds", "changes")}},
        _SERVER,
    ),
}


@dataclass(frozen=True)
class ServeCommand:
    """One server: `fleet.py serve`.

    Attributes:
        class_names: as given; None: those of its data set, on whose test photos it then tests the models.
        config: the options as config.json keeps them.
        simulation: the boards of `fleet.py simulate`; None: real ones.
    """

    fleet: FleetSettings
    training: TrainCommand
    class_names: list[str] | None
    config: dict[str, Any]
    simulation: SimulationSettings | None = None


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

    @property
    def folder(self) -> Path:
        """Where the board writes."""
        return self.logdir / "boards" / self.name


def parse_fleet(arguments: Sequence[str] | None = None) -> ServeCommand | JoinCommand:
    """The command line of fleet.py. Raises `UserError` for wrong flags."""
    given = [*(sys.argv[1:] if arguments is None else arguments)]
    args = fleet_parser().parse_args(given)
    if args.command == "join":
        return _join(given[1:], args)
    if isinstance(getattr(args, "resume", None), Path):
        return _resumed(given[1:], args.resume)
    return _serve(given[1:], args, given)


def fleet_parser() -> OneLineParser:
    """The flags of fleet.py."""
    description = "One model from many boards, whose photos stay where they are."
    parser = OneLineParser([main_parser, profiler_parser], prog="fleet.py", description=description)
    commands = parser.add_subparsers(dest="command", required=True, metavar="|".join(COMMANDS))
    siblings = [*(partial(_parser_of, name) for name in COMMANDS), main_parser, profiler_parser]
    for name, command in COMMANDS.items():
        add_flags(commands.add_parser(name, help=command.help, siblings=siblings), command.flags)
    return parser


def _parser_of(name: str) -> OneLineParser:
    """The flags of one command of fleet.py."""
    parser = OneLineParser(prog=f"fleet.py {name}")
    add_flags(parser, COMMANDS[name].flags)
    return parser


def _typed(args: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    """The options of main.py that are among the `words`, even if they equal a default."""
    names = {*COMMANDS[args.command].main} - {"resume", "overwrite"}
    typed = {name: getattr(args, name) for name in _parser_of(args.command).given(words) if name in names}
    return {**typed, "memory": f"{typed['memory']}M"} if "memory" in typed else typed


# --- the server -------------------------------------------------------------------------------------------------------


def _resumed(words: list[str], folder: Path) -> ServeCommand:
    """The server of the run in `folder`, with its words and those that are given now."""
    started = started_with(folder)
    if started[:1] != ["serve"]:
        how = "a simulation starts again" if started[:1] == ["simulate"] else "continue it with main.py"
        raise UserError(f"--resume {folder}: is not the run of a fleet; {how}")
    place = as_words({"logdir": folder.absolute().parent, "run_name": folder.absolute().name, "overwrite": False})
    words = [*started[1:], *words, *place]
    args = fleet_parser().parse_args(["serve", *words])
    args.resume = True
    return _serve(words, args, [word for word in started if word != "--resume"])


def _serve(words: Sequence[str], args: argparse.Namespace, given: list[str]) -> ServeCommand:
    """The server of these `words`; config.json keeps the words that were `given`."""
    is_simulated, typed, names = args.command == "simulate", _typed(args, words), None
    if getattr(args, "class_names", None):
        names = [class_name(name) for name in args.class_names.split(",")]
        _check_classes(names, args)
        typed["num_classes"] = len(names)
    run_name = f"{'simulated' if is_simulated else 'fleet'}_{args.dataset_name}"
    chosen = {"dataset_name": args.dataset_name, "run_name": run_name}
    chosen |= {"recipe": "robust", "train_type": SCHEME, "save_model": True}
    switches = [f"--{name}" for name in ("resume", "overwrite") if getattr(args, name, False)]
    training = parse_training([*as_words(typed), *switches], as_words(chosen))
    fleet, simulation = from_options(FleetSettings, vars(args)), None
    if is_simulated:
        simulation = from_options(SimulationSettings, vars(args))
        fleet = replace(fleet, boards=simulation.clients, grace=1e6)
    own = {name: getattr(args, name) for name in COMMANDS[args.command].own}
    own = {name: value if isinstance(value, int | float | None) else str(value) for name, value in own.items()}
    command = ServeCommand(fleet, training, names, {**training.config, **own, "command": given}, simulation)
    folder = training.run.folder
    if training.run.resume and is_run(folder):
        free = FREE_ON_RESUME.union(name for name, flag in FLEET_FLAGS.items() if flag.is_free)
        change = first_change(command.config, read_config(folder), free)
        if change is not None:
            raise UserError(
                f"--resume: the fleet in {folder} was started with {change}; use the same, or give another --run_name"
            )
    return command


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


# --- a board ----------------------------------------------------------------------------------------------------------


def _join(words: list[str], args: argparse.Namespace) -> JoinCommand:
    typed = _typed(args, words)
    custom = typed.pop("model_name", None)
    if custom is not None and not is_custom_model(custom):
        raise UserError(f"--model_name {custom}: the server says which network; give FILE.py:FUNCTION alone")
    if args.data_dir is not None and "dataset_name" not in typed:
        args.dataset_name = "image_folder"
    typed["dataset_name"] = args.dataset_name
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
    fixed = {"weights": "none", "train_type": SCHEME, "rho": 1, "save_model": False}
    return parse_training([*words, *command.words, *as_words(fixed)])
