"""Boards in the process of the server, without a network: for simulations and tests."""

from __future__ import annotations

from collections.abc import Callable, Collection

from elastic_trainer.errors import UserError
from elastic_trainer.extensions.fleet.link import Delivery
from elastic_trainer.extensions.fleet.parcel import Parcel, failed


class LocalLink:
    """A `Link` to boards that answer when they are asked.

    Args:
        boards: what each makes of a message, by its number.
        now: seconds since some start.
        takes: seconds until a reply has come, by board and reply; at once if left out.
    """

    def __init__(
        self,
        boards: dict[int, Callable[[Parcel], Parcel]],
        now: Callable[[], float] = lambda: 0.0,
        takes: Callable[[int, Parcel], float] = lambda node, reply: 0.0,
    ) -> None:
        self.boards, self._now, self._takes = boards, now, takes
        self._replies: dict[str, tuple[float, Delivery]] = {}
        self._count = 0

    def nodes(self) -> list[int]:
        """See `Link.nodes`."""
        return [*self.boards]

    def send(self, node: int, parcel: Parcel, seconds: float) -> tuple[str, int]:
        """See `Link.send`."""
        self._count += 1
        number, content = str(self._count), parcel.to_bytes()
        try:
            reply = self.boards[node](Parcel.from_bytes(content))
        except UserError as error:
            reply = failed(str(error))
        back = reply.to_bytes()
        delivery = Delivery(len(back), Parcel.from_bytes(back))
        self._replies[number] = self._now() + self._takes(node, reply), delivery
        return number, len(content)

    def receive(self, messages: Collection[str]) -> dict[str, Delivery]:
        """See `Link.receive`."""
        due = [number for number in messages if number in self._replies and self._replies[number][0] <= self._now()]
        return {number: self._replies.pop(number)[1] for number in due}
