"""Who takes part in a fleet, and the messages that are on their way. What a board does wrong is one line, no error."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from elastic_trainer.errors import UserError, printable
from elastic_trainer.extensions.fleet.link import Delivery, Link, LinkDownError
from elastic_trainer.extensions.fleet.parcel import Parcel

POLL_SECONDS = 0.25  # between two looks for replies
NODES_SECONDS = 2.0  # between two looks for boards
HELLO_SECONDS = 1800.0  # in which a board gets ready: it reads its photos and measures a timing table
LONGEST_SECONDS = 600.0  # at least, after which nothing waits for an answer any more
MOST_FAILURES = 3  # in a row, after which a board is left out until it starts again


@dataclass(frozen=True)
class Clock:
    """Where a server gets its time from; a simulation has its own.

    Attributes:
        now: seconds since some start.
        pause: waits for so many seconds.
    """

    now: Callable[[], float] = time.monotonic
    pause: Callable[[float], object] = time.sleep


@dataclass(eq=False)
class Member:
    """A board.

    Attributes:
        node: its number in Flower, another one after each start.
        name: its own; until it has said it, its number.
        about: the values of its "ready" reply; empty until it came.
        message: the one that it has not answered, or None; `asked_for` says what that was.
        failures: how often in a row it replied that it could not do what it was asked for.
    """

    node: int
    name: str
    about: dict[str, Any] = field(default_factory=dict)
    message: str | None = None
    asked_for: str = ""
    failures: int = 0

    @property
    def is_free(self) -> bool:
        """Whether it can be asked for something."""
        return bool(self.about) and self.message is None


@dataclass
class Answer:
    """A board's answer to what all were asked for: the bytes of message and reply, the reply, and when it came."""

    member: Member
    sent: int
    size: int
    parcel: Parcel
    seconds: float


class Roster:
    """The boards that are online.

    Args:
        link: to them.
        hello: makes the message that gets a board ready.
        say: is given a line on each event.
        clock: of the fleet.
    """

    def __init__(
        self,
        link: Link,
        hello: Callable[[], Parcel],
        say: Callable[[str], object],
        clock: Clock = Clock(),
    ) -> None:
        self._link, self._hello, self._say, self._clock = link, hello, say, clock
        self.members: dict[int, Member] = {}
        self._looked = float("-inf")
        self._replaced: dict[int, str] = {}  # nodes whose board seemed to have started again, and its name

    @property
    def ready(self) -> list[Member]:
        """Those that have said what they can do."""
        return [member for member in self.members.values() if member.about]

    def wait_for(self, count: int, is_free: bool = False) -> list[Member]:
        """Wait until so many boards are ready, or free; says once what it waits for."""
        has_said = False
        while True:
            self._receive({}, {})
            found = [member for member in self.ready if member.is_free or not is_free]
            if len(found) >= count:
                return found
            if not has_said:
                self._say(f"waiting for {count} board{'s' if count > 1 else ''}, {len(found)} of them ready")
                has_said = True
            self._clock.pause(POLL_SECONDS)

    def ask(self, parcel: Parcel, seconds: float, what: str) -> list[Answer]:
        """Send `parcel` to all boards that are free; their replies, as far as they come within so many seconds.

        Those that are still busy with something earlier are left out, and those that do not answer are named.
        """
        start, sent = self._clock.now(), dict[str, tuple[Member, int]]()
        for member in self.ready:
            if member.is_free:
                size = self._send(member, parcel, max(10 * seconds, LONGEST_SECONDS), what)
                if member.message is not None:
                    sent[member.message] = member, size
            else:
                self._say(f"{what}: board {member.name} is left out, it is still busy with {member.asked_for}")
        answers: dict[str, Answer] = {}
        while len(answers) < len(sent) and self._clock.now() - start < seconds:
            self._receive(sent, answers, start)
            for number, (member, size) in sent.items():  # one whose board is gone gets no answer
                if member.node not in self.members and number not in answers:
                    answers[number] = Answer(member, size, 0, Parcel("failed", {"why": "it is gone"}), 0.0)
            if len(answers) < len(sent):
                self._clock.pause(POLL_SECONDS)
        for number, (member, _) in sent.items():
            if number not in answers:
                self._say(f"{what}: board {member.name} did not answer within {seconds:.0f} s; going on without it")
        return [one for one in answers.values() if one.parcel.kind != "failed"]

    def _send(self, member: Member, parcel: Parcel, seconds: float, what: str) -> int:
        try:
            member.message, size = self._link.send(member.node, parcel, seconds)
        except LinkDownError:
            raise
        except UserError as error:
            self._say(f"{what}: board {member.name}: {error}")
            return 0
        member.asked_for = what
        return size

    def _look(self) -> None:
        """Greet new boards, and forget those that are gone."""
        if self._clock.now() - self._looked < NODES_SECONDS:
            return
        self._looked, online = self._clock.now(), {*self._link.nodes()}
        for node in [*self.members]:
            if node not in online:
                member = self.members.pop(node)
                self._say(f"board {member.name} is gone")
                for other in [one for one, name in self._replaced.items() if name == member.name]:
                    del self._replaced[other]
                    if other in self.members:
                        self.members[other].failures = 0
        for node in online - {*self.members}:
            self.members[node] = Member(node, f"number {node}")
        for member in self.members.values():
            if not member.about and member.message is None and member.failures < MOST_FAILURES:
                self._send(member, self._hello(), HELLO_SECONDS, "getting ready")

    def _receive(self, sent: dict[str, tuple[Member, int]], answers: dict[str, Answer], start: float = 0.0) -> None:
        """Take what has come: `answers` get those to `sent`; what came too late is named, and dropped."""
        self._look()
        waiting = {member.message: member for member in self.members.values() if member.message is not None}
        for number, delivery in self._link.receive(waiting.keys()).items():
            member = waiting[number]
            what, member.message = member.asked_for, None
            if delivery.parcel.kind == "failed":
                is_left_out = not member.about  # what it cannot do at first, it cannot do later
                member.failures = MOST_FAILURES if is_left_out else member.failures + 1
                member.about = {}  # it is greeted again
                why = printable(str(delivery.parcel.values.get("why"))[:300])
                self._say(f"{what}: board {member.name}: {why}")
            elif delivery.parcel.kind == "ready":
                self._welcome(member, delivery)
            else:
                member.failures = 0
                if number not in sent:
                    self._say(f"board {member.name}: its answer to {what} came too late and is dropped")
            if number in sent:
                answers[number] = Answer(
                    member, sent[number][1], delivery.size, delivery.parcel, self._clock.now() - start
                )

    def _welcome(self, member: Member, delivery: Delivery) -> None:
        values = delivery.parcel.values
        try:
            about: dict[str, Any] = {
                **{"name": printable(str(values["name"]))[:60]},
                **{name: int(values[name]) for name in ("images", "test_images")},
                **{name: float(values[name]) for name in ("full_seconds", "head_seconds")},
            }
            if not (about["images"] > 0 and 0 < about["head_seconds"] <= about["full_seconds"] < 1e9):
                raise ValueError("numbers that cannot be")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            member.failures = MOST_FAILURES
            self._say(f"board {member.name}: its first answer is wrong ({error}); it is left out")
            return
        for node, other in [*self.members.items()]:
            if other.name == about["name"] and other is not member:
                if member.node in self._replaced:
                    member.failures = MOST_FAILURES
                    self._say(f"two boards have the name {other.name}: one is left out; give it another --name")
                    return
                del self.members[node]
                self._replaced[node] = other.name
                self._say(f"board {other.name} has started again")
        is_new, member.name, member.about = not member.about, about["name"], about
        if is_new:
            self._say(
                f"board {member.name}: {about['images']} photos, a pass over them takes {about['full_seconds']:.1f} s, "
                f"of its head alone {about['head_seconds']:.1f} s"
            )
