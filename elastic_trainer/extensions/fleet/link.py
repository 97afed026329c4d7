"""How a server reaches its boards, and the sockets to Flower's messengers (`app/fleet_app.py`) on the same machine.

It needs no Flower, so servers and boards can be tested, and simulated, in one process.
"""

from __future__ import annotations

import secrets
import time
import traceback
from collections.abc import Callable, Collection
from contextlib import closing
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import NamedTuple, Protocol

import numpy as np

from elastic_trainer.errors import UserError, first_line
from elastic_trainer.extensions.fleet.messages import Parcel, failed

ADDRESS, KEY = "ELASTIC_FLEET_ADDRESS", "ELASTIC_FLEET_KEY"  # in the environment of Flower's processes


class LinkDownError(UserError):
    """Nothing can be sent any more: the fleet's server has to be started again."""


class Delivery(NamedTuple):
    """A reply: its bytes on the network, and the parcel, which is of the kind "failed" if there is none."""

    size: int
    parcel: Parcel


class Link(Protocol):
    """A server's connection to its boards."""

    def nodes(self) -> list[int]:
        """The boards that are online, by the numbers that Flower gives them; a new one after each start."""

    def send(self, node: int, parcel: Parcel, seconds: float) -> tuple[str, int]:
        """Send to a board a message that expires after `seconds`; returns its number, and its size in bytes."""

    def receive(self, messages: Collection[str]) -> dict[str, Delivery]:
        """The replies to these messages that have come, each once."""


class Socket:
    """Where Flower's messengers connect; `environment` tells them where that is."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._listener = Listener(authkey=self._key)
        self.environment = {ADDRESS: str(self._listener.address), KEY: self._key.hex()}

    def accept(self) -> Connection:
        """The next messenger."""
        while True:
            try:
                return self._listener.accept()
            except (AuthenticationError, EOFError, ConnectionError):
                continue  # not one of ours, or it has ended in the meantime

    def tell(self, kind: str, why: str) -> None:
        """Bring a message from this process."""
        with closing(Client(self._listener.address, authkey=self._key)) as connection:
            connection.send_bytes(Parcel(kind, {"why": why}).to_bytes())

    def close(self) -> None:
        """Take no more."""
        self._listener.close()


def answer(socket: Socket, handle: Callable[[Parcel], Parcel]) -> Parcel:
    """Answer one message to a board by what `handle` makes of it, a `UserError` by "failed". Returns the message."""
    with closing(socket.accept()) as connection:
        try:
            parcel = Parcel.from_bytes(connection.recv_bytes())
        except (EOFError, OSError, ValueError) as error:
            return failed(first_line(error))
        if parcel.kind == "down":
            return parcel
        try:
            reply = handle(parcel)
        except UserError as error:
            print(f"{parcel.kind}: {error}", flush=True)
            reply = failed(str(error))
        except Exception as error:  # a message may hold anything, and the board goes on
            traceback.print_exc()
            reply = failed(f"{type(error).__name__}: {first_line(error)}")
        try:
            connection.send_bytes(reply.to_bytes())
        except OSError as error:
            print(f"the reply could not be passed on: {first_line(error)}", flush=True)
        return parcel


class FlowerLink:
    """The link through Flower's ServerApp, which connects to `socket` once it runs."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def nodes(self) -> list[int]:
        return [*self._asked(Parcel("nodes")).values["nodes"]]

    def send(self, node: int, parcel: Parcel, seconds: float) -> tuple[str, int]:
        content = np.frombuffer(parcel.to_bytes(), np.uint8)
        sent = self._asked(Parcel("send", {"node": node, "ttl": seconds}, {"parcel": content}))
        return sent.values["message"], content.nbytes

    def receive(self, messages: Collection[str]) -> dict[str, Delivery]:
        if not messages:
            return {}
        found = self._asked(Parcel("receive", {"messages": [*messages]}))
        replies = {number: Delivery(0, failed(why)) for number, why in found.values["errors"].items()}
        for number, content in found.arrays.items():
            try:
                parcel = Parcel.from_bytes(content.tobytes())
            except ValueError as error:
                parcel = failed(f"its reply cannot be read: {first_line(error)}")
            replies[number] = Delivery(content.nbytes, parcel)
        return replies

    def _asked(self, request: Parcel) -> Parcel:
        """Raises `LinkDownError` if Flower's ServerApp has ended, and `UserError` if it cannot do it."""
        try:
            self._connection.send_bytes(request.to_bytes())
            reply = Parcel.from_bytes(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise LinkDownError(
                "Flower's SuperLink or ServerApp has ended; its messages are in superlink.log in the run's folder. "
                "Continue with fleet.py serve --resume"
            ) from error
        if reply.kind == "failed":
            raise UserError(f"Flower could not pass on a message: {reply.values['why']}")
        return reply

    def close(self) -> None:
        """Let the ServerApp end, which has a moment for it."""
        self._connection.close()
        time.sleep(0.2)
