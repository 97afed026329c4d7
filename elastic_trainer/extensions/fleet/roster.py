"""Who takes part in a fleet, and the messages that are on their way. What a board does wrong is one line, no error."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from elastic_trainer.errors import UserError
from elastic_trainer.extensions.fleet.messages import About, Parcel, about_of, reason

Parsed = TypeVar("Parsed")
POLL_SECONDS = 0.25  # between two looks for boards and replies
HELLO_SECONDS = 86_400.0  # a board gets ready in its own time; that it has started again, Flower says
LONGEST_SECONDS = 600.0  # at least, after which nothing waits for an answer any more
MAX_FAILURES = 3  # in a row, after which a board is left out until it starts again


class Link(Protocol):
    """A server's connection to its boards: through Flower (`FlowerLink`), or in one process (`simulated.LocalLink`).

    It has the time of the server, too, which is simulated where the boards' time is.
    """

    def now(self) -> float:
        """Seconds since some start."""

    def pause(self, seconds: float) -> None:
        """Wait this many seconds. May raise `Stopped`."""

    def nodes(self) -> dict[int, tuple[str, str]]:
        """The boards that are online, by the numbers that Flower gives them.

        Of each the name of its key, "" without, and when it started. Without a key, its number is new after each start.
        """

    def send(self, node: int, parcel: Parcel, seconds: float) -> str:
        """Send to a board a message that expires after `seconds`; returns its number."""

    def receive(self, messages: Collection[str]) -> dict[str, Parcel]:
        """The replies to these messages that have come, each once; of the kind "failed" where there is none."""


class Sent(NamedTuple):
    """A message on its way: its number, what it asks for, its size in bytes, and when it was sent."""

    number: str
    what: str
    size: int
    time: float


@dataclass(eq=False)
class Member:
    """A board.

    Attributes:
        node: its number in Flower, another one after each start.
        name: that of its key; without a key its own, and until it has said it, its number.
        about: what it said of itself when it got ready; None before.
        sent: the message that it has not answered, or None.
        failures: how often in a row it replied that it could not do what it was asked for.
        ready_seconds: that it took to get ready.
        since: when it started, in Flower's words.
    """

    node: int
    name: str
    has_key: bool = False
    about: About | None = None
    sent: Sent | None = None
    failures: int = 0
    ready_seconds: float = 0.0
    since: str = ""

    @property
    def is_free(self) -> bool:
        """Whether it can be asked for something."""
        return self.about is not None and self.sent is None


class Answer(NamedTuple):
    """A board's reply to a message, and the seconds after which it came."""

    member: Member
    about: About
    sent: Sent
    parcel: Parcel
    seconds: float


class Roster:
    """The boards that are online.

    Args:
        link: to them.
        say: is given a line on each event.

    Attributes:
        hello: makes the message that gets a board ready; the server sets it.
    """

    def __init__(self, link: Link, say: Callable[[str], object] = print) -> None:
        self.say, self.now = say, link.now
        self.hello: Callable[[], Parcel] = lambda: Parcel("hello")
        self._link, self._members = link, dict[int, Member]()
        self._replaced: dict[int, str] = {}  # nodes whose board seemed to have started again, and its name

    @property
    def ready(self) -> dict[Member, About]:
        """Those that have said what they can do."""
        return {member: member.about for member in self._members.values() if member.about is not None}

    def wait_for(self, count: int, is_free: bool = False, least: int | None = None, seconds: float = 0.0) -> None:
        """Wait until `count` boards are ready, or free; says once what it waits for.

        Once no other one has come for `seconds`, at `least` so many are enough.
        """
        has_said, before, latest = False, 0, self.now()
        while True:
            self._receive()
            found = sum(member.is_free or not is_free for member in self.ready)
            if found >= count:
                return
            if found != before:
                before, latest = found, self.now()
            if least is not None and found >= least and self.now() - latest > seconds:
                self.say(f"going on with {found} of {count} boards")
                return
            if not has_said:
                self.say(f"waiting for {count} board{'s' if count > 1 else ''}, {found} of them ready")
                has_said = True
            self._link.pause(POLL_SECONDS)

    def ask(self, parcel: Parcel, seconds: float, what: str, nodes: Collection[int] | None = None) -> list[Answer]:
        """Send `parcel` to all boards that are free, or to those of these `nodes`; the answers that come in `seconds`.

        Those that are still busy with something earlier are left out, and those that do not answer are named.
        """
        start, waiting, answers = self.now(), dict[Member, Sent](), list[Answer]()
        for member in self.ready:
            if nodes is not None and member.node not in nodes and member.is_free:
                continue
            if member.sent is not None:
                self.say(f"{what}: board {member.name} is left out, it is still busy with {member.sent.what}")
            elif (sent := self._send(member, parcel, max(10 * seconds, LONGEST_SECONDS), what)) is not None:
                waiting[member] = sent
        while waiting and self.now() - start < seconds:
            answers += self._receive(waiting.values())
            here = self._members.values()
            waiting = {member: sent for member, sent in waiting.items() if member in here and member.sent is sent}
            if waiting:
                self._link.pause(POLL_SECONDS)
        for member in waiting:
            self.say(f"{what}: board {member.name} did not answer within {seconds:.0f} s; going on without it")
        return answers

    def parsed(
        self, answers: Sequence[Answer], parse: Callable[[Answer], Parsed], text: str
    ) -> list[tuple[Answer, Parsed]]:
        """The answers that `parse` can read, and what it reads; a line of this `text` on each other one."""
        found = []
        for answer in answers:
            try:
                found.append((answer, parse(answer)))
            except ValueError as error:
                self.say(text.format(answer.member.name, error))
        return found

    def _send(self, member: Member, parcel: Parcel, seconds: float, what: str) -> Sent | None:
        """Send a message that expires after `seconds`; None if that is not possible, which is a line."""
        try:
            number = self._link.send(member.node, parcel, seconds)
        except UserError as error:
            self.say(f"{what}: board {member.name}: {error}")
            return None
        member.sent = Sent(number, what, parcel.size, self.now())
        return member.sent

    def _look(self) -> None:
        """Greet new boards, and forget those that are gone."""
        online = self._link.nodes()
        for node in {*self._members} - {*online}:
            member = self._members.pop(node)
            self.say(f"board {member.name} is gone")
            for other in [one for one, name in self._replaced.items() if name == member.name]:
                del self._replaced[other]
                if other in self._members:
                    self._members[other].failures = 0
        for node, (name, since) in online.items():
            before = self._members.get(node)
            if before is not None and before.since != since:  # so it cannot answer what it was asked
                self.say(f"board {before.name} has started again")
            if before is None or before.since != since:
                self._members[node] = Member(node, name or f"number {node}", has_key=bool(name), since=since)
        for member in self._members.values():
            if member.about is None and member.sent is None and member.failures < MAX_FAILURES:
                self._send(member, self.hello(), HELLO_SECONDS, "getting ready")

    def _receive(self, wanted: Collection[Sent] = ()) -> list[Answer]:
        """Take what has come: the answers to messages that are `wanted`; others are too late, and dropped."""
        self._look()
        members = self._members.values()
        waiting = {one.sent.number: (one, one.sent) for one in members if one.sent is not None}
        answers = []
        for number, parcel in self._link.receive(waiting.keys()).items():
            member, sent = waiting[number]
            about, member.sent = member.about, None
            if parcel.kind == "failed":
                # What it cannot do at first, it cannot do later. Else it is greeted again.
                member.failures = MAX_FAILURES if about is None else member.failures + 1
                member.about = None
                self.say(f"{sent.what}: board {member.name}: {reason(parcel)}")
            elif about is None:
                member.ready_seconds = self.now() - sent.time
                self._welcome(member, parcel)
            elif sent in wanted:
                member.failures = 0
                answers.append(Answer(member, about, sent, parcel, self.now() - sent.time))
            else:
                member.failures = 0
                self.say(f"board {member.name}: its answer to {sent.what} came too late and is dropped")
        return answers

    def _welcome(self, member: Member, parcel: Parcel) -> None:
        """A board has said what it can do."""
        try:
            about = about_of(parcel)
        except ValueError as error:
            member.failures = MAX_FAILURES
            self.say(f"board {member.name}: its first answer is wrong ({error}); it is left out")
            return
        if member.has_key:  # nobody can take the name of another board's key
            about = about._replace(name=member.name)
        for node, other in [*self._members.items()]:
            if other.name == about.name and other is not member:
                if member.node in self._replaced:
                    member.failures = MAX_FAILURES
                    self.say(f"two boards have the name {other.name}: one is left out; give it another --name")
                    return
                del self._members[node]
                self._replaced[node] = other.name
                self.say(f"board {other.name} has started again")
        member.name, member.about = about.name, about
        self.say(
            f"board {about.name}: {about.images} photos, a pass over them takes {about.full_seconds:.1f} s, of its "
            f"head alone {about.head_seconds:.1f} s"
        )
