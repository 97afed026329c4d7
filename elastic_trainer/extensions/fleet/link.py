"""How a server reaches its boards: through Flower (`runtime.FlowerLink`), or in one process (`simulated.LocalLink`)."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, Protocol

from elastic_trainer.errors import UserError
from elastic_trainer.extensions.fleet.messages import Parcel


class LinkDownError(UserError):
    """Nothing can be sent any more: the fleet's server has to be started again."""


class Delivery(NamedTuple):
    """A reply: its bytes on the network, and the parcel, which is of the kind "failed" if there is none."""

    size: int
    parcel: Parcel


class Link(Protocol):
    """A server's connection to its boards."""

    def nodes(self) -> dict[int, tuple[str, str]]:
        """The boards that are online, by the numbers that Flower gives them.

        Of each the name of its key, "" without, and when it started. Without a key, its number is new after each start.
        """

    def send(self, node: int, parcel: Parcel, seconds: float) -> tuple[str, int]:
        """Send to a board a message that expires after `seconds`; returns its number, and its size in bytes."""

    def receive(self, messages: Collection[str]) -> dict[str, Delivery]:
        """The replies to these messages that have come, each once."""
