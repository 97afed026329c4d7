"""The Flower app of a fleet: what its ServerApp and its ClientApp do, and a fleet's messages as Flower carries them.

`flwr run` on the folder `app` lets Flower start one process for the server, and one for each message to a board: its
network is built and compiled for each message, and what it has learnt of itself is in Flower's context. In Flower's
simulation an actor keeps network and steps for all its boards. `fleet.py serve` and `fleet.py join` do the same in
their own long-lived processes (`superlink`, `supernode`).
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.superlink.grid import InMemoryGrid

from elastic_trainer.cli.parser import as_words
from elastic_trainer.errors import UserError, first_line, printable
from elastic_trainer.extensions.fleet.command_line import COMMANDS, JoinCommand, ServeCommand, parse_fleet
from elastic_trainer.extensions.fleet.messages import Parcel, failed
from elastic_trainer.extensions.fleet.roster import Link
from elastic_trainer.files import alone_in
from elastic_trainer.machine import load_tensorflow
from elastic_trainer.networks.names import is_custom_model
from elastic_trainer.settings import BEST_MODEL

if TYPE_CHECKING:
    from elastic_trainer.extensions.fleet.board import Board
    from elastic_trainer.extensions.fleet.rounds import BoardSetup
    from elastic_trainer.training.state import TrainState

Handle = Callable[[Parcel], Parcel]
Setup = Callable[[JoinCommand, Sequence[str], Sequence[str]], "BoardSetup"]  # by the server's words and class names
ENDLESS = 1e6  # seconds: simulated boards answer one after the other
BOARD, PARCEL = "board", "parcel"


def _record(parcel: Parcel) -> ArrayRecord:
    return ArrayRecord({PARCEL: Array(np.frombuffer(parcel.to_bytes(), np.uint8))})


def _content(record: RecordDict, name: str = PARCEL) -> bytes:
    """Raises `ValueError` if there is no parcel."""
    try:
        return record.array_records[name][PARCEL].numpy().tobytes()
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError("it holds no parcel") from error


# --- a board ----------------------------------------------------------------------------------------------------------


def client_app(setup: Setup) -> ClientApp:
    """The app of a SuperNode, which answers a server's messages with what `setup` makes."""
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        return answer(message, partial(_handle, context, setup))

    return app


def answer(message: Message, handle: Handle) -> Message:
    """The reply to a message: what `handle` makes of its parcel, or why there is nothing."""
    kind = "a message"
    try:
        parcel = Parcel.from_bytes(_content(message.content))
        kind = parcel.kind
        reply = handle(parcel)
    except (UserError, ValueError) as error:
        print(f"{kind}: {first_line(error)}", flush=True)
        reply = failed(str(error))
    except Exception as error:  # a message may hold anything, and the board goes on
        traceback.print_exc()
        reply = failed(f"{type(error).__name__}: {first_line(error)}")
    return Message(RecordDict({PARCEL: _record(reply)}), reply_to=message)


def _handle(context: Context, setup: Setup, parcel: Parcel) -> Parcel:
    """The answer of a SuperNode's board, by its --node-config, which has the flags of `fleet.py join`.

    With `partition-id` and `num-partitions`, as Flower's simulation sets them, it has that part of the data set in the
    run's configuration.
    """
    config = dict(context.node_config)
    place, parts = config.pop("partition-id", None), int(config.pop("num-partitions", 1))
    if place is not None:
        shared = {name: context.run_config[name] for name in COMMANDS["join"].main if name in context.run_config}
        if not is_custom_model(str(shared.get("model_name", ""))):
            shared.pop("model_name", None)  # boards hear it from the server
        config = {"name": f"board-{place}", **shared, **config}
    command = parse_fleet(["join", *_words(config)])
    assert isinstance(command, JoinCommand), "it joins"
    if parcel.kind != "hello" or _is_simulated():  # it takes the timing table that is there
        command = replace(command, words=[*command.words, "--allow_stale_profile"])
    load_tensorflow()
    board = real_board(command, setup) if place is None else _part(command, setup, context, int(place), parts)
    if BOARD in context.state and parcel.kind != "hello":
        board.go_on(Parcel.from_bytes(_content(context.state, BOARD)))
    if parcel.kind == "train":
        board.get_ready(parcel.values["seconds"])
    reply = board.handle(parcel)
    if parcel.kind == "end" and not _is_simulated():
        board.save_model(parcel.arrays, command.folder / BEST_MODEL)
    context.state[BOARD] = _record(board.kept())
    return reply


def real_board(command: JoinCommand, setup: Setup) -> Board:
    """The board of `fleet.py join`."""
    from elastic_trainer.extensions.fleet.board import Board
    from elastic_trainer.extensions.fleet.rounds import RoundClock

    return Board(command.name, partial(setup, command), RoundClock(command.board.slowdown))


_whole: dict[str, BoardSetup] = {}  # of the network that this process trains, with all photos
_steps: list[TrainState] = []  # its compiled steps


def _part(command: JoinCommand, setup: Setup, context: Context, place: int, parts: int) -> Board:
    """The board that has one of so many `parts` of the photos."""
    import keras

    from elastic_trainer.extensions.fleet.board import Board
    from elastic_trainer.extensions.fleet.rounds import RoundClock
    from elastic_trainer.extensions.fleet.simulated import SimulatedBoard, SimulatedClock, slowdowns, split, with_part

    def make(words: Sequence[str], class_names: Sequence[str]) -> BoardSetup:
        asked = repr((words, class_names))
        if asked not in _whole:
            _whole.clear()
            _steps.clear()
            keras.utils.clear_session()  # networks built before name the layers of the next one otherwise
            with alone_in(command.folder.parent):  # the first process measures the timing table of all
                _whole[asked] = setup(command, words, class_names)
        whole, uneven = _whole[asked], float(context.run_config.get("uneven", 0))
        rows = split(whole.data.training_labels, parts, uneven or None, whole.data.batch_size, whole.data.seed)
        return with_part(whole, rows[place], place + 1)

    if not _is_simulated():
        return Board(command.name, make, RoundClock(command.board.slowdown))
    slower = slowdowns(parts, float(context.run_config.get("slowest", 1)))[place]
    return SimulatedBoard(command.name, make, SimulatedClock(slower), lambda line: None, _steps)


def _is_simulated() -> bool:
    """Whether this is an actor of Flower's simulation, which runs boards in Ray."""
    return "ray" in sys.modules


def _words(config: dict[str, Any]) -> list[str]:
    """The words of a command line for what a configuration of Flower gives. Empty values are not given."""
    return as_words({name: value for name, value in config.items() if value != ""})


# --- the server -------------------------------------------------------------------------------------------------------


def server_app(serve: Callable[[ServeCommand, Link], object]) -> ServerApp:
    """The app that runs a fleet by `serve`. The run's configuration has flags of `fleet.py serve`."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        flags = {name: value for name, value in context.run_config.items() if name in COMMANDS["serve"].flags}
        if not flags.get("resume") and not flags.get("run_name"):
            flags["run_name"] = f"flower_{context.run_id}"
        try:
            command, link = parse_fleet(["serve", *_words(flags)]), FlowerLink(grid)
        except UserError as error:
            raise UserError(f"--run-config: {error}") from None  # Flower prints how it came to this
        assert isinstance(command, ServeCommand), "it serves"
        fleet = replace(command.fleet, starts_boards=True)
        if isinstance(grid, InMemoryGrid):
            if fleet.round_seconds is None:
                raise UserError("--run-config: a simulation needs round_seconds, since boards wait for each other")
            fleet = replace(fleet, grace=ENDLESS, boards=len(link.nodes()))
        serve(replace(command, fleet=fleet), link)

    return app


class FlowerLink:
    """The link to the boards through a grid of Flower.

    Args:
        grid: Flower's.
        check: is called before each pause; may raise an error to stop.
    """

    def __init__(self, grid: Grid, check: Callable[[], object] = lambda: None) -> None:
        self._grid, self._check = grid, check

    def now(self) -> float:
        return time.monotonic()

    def pause(self, seconds: float) -> None:
        self._check()
        time.sleep(seconds)

    def nodes(self) -> dict[int, tuple[str, str]]:
        nodes: Any = self._grid.get_nodes()  # type: ignore[attr-defined]
        return {node.node_id: (printable(node.name)[:60], node.last_activated_at) for node in nodes}

    def send(self, node: int, parcel: Parcel, seconds: float) -> str:
        message = Message(RecordDict({PARCEL: _record(parcel)}), node, "query", ttl=seconds)
        [number] = self._grid.push_messages([message]) or [None]
        if not number:
            raise UserError("Flower could not pass on a message")
        return number

    def receive(self, messages: Collection[str]) -> dict[str, Parcel]:
        found = {number: self._received(number) for number in messages}
        return {number: parcel for number, parcel in found.items() if parcel is not None}

    def _received(self, number: str) -> Parcel | None:
        """The reply to one message: it may hold anything, also what Flower does not expect, and spoils no other one."""
        try:
            for reply in self._grid.pull_messages([number]):
                if reply.has_error():
                    return failed(f"{reply.error.reason} (Flower's error {reply.error.code})")
                return Parcel.from_bytes(_content(reply.content))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            return failed(f"its reply cannot be read: {first_line(error)}")
        return None
