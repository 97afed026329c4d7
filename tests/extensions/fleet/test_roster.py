"""Who takes part: a board that fails again and again, two boards with one name, and one that cannot be."""

from elastic_trainer.errors import UserError
from elastic_trainer.extensions.fleet.messages import Parcel
from elastic_trainer.extensions.fleet.roster import MAX_FAILURES, Roster
from elastic_trainer.extensions.fleet.simulated import LocalLink


class Board:
    """Gets ready, and counts what it is asked for; `fails` says at which of its trainings it cannot."""

    def __init__(self, name, fails=lambda count: False):
        self.name, self.fails, self.asked = name, fails, 0

    def handle(self, parcel):
        if parcel.kind == "hello":
            numbers = {"images": 8, "test_images": 2, "full_seconds": 2.0, "head_seconds": 1.0}
            return Parcel("ready", {"name": self.name, **numbers})
        self.asked += 1
        if self.fails(self.asked):
            raise UserError("the disk is full")
        return Parcel("trained")


def rounds(boards, count, ends_after=()):
    """Ask the boards `count` times; what was said. After that many rounds, the board of a place is gone."""
    said = list[str]()
    link = LocalLink({node: board.handle for node, board in enumerate(boards)})
    roster = Roster(link, said.append)
    for number in range(count):
        for node, last in ends_after:
            if number == last:
                del link.boards[node]
        link.pause(3.0)
        roster.wait_for(1)
        roster.ask(Parcel("train"), 5.0, "round")
    return said


def test_a_board_that_fails_three_times_in_a_row_is_left_out():
    always, twice, good = Board("a", lambda count: True), Board("b", lambda count: count % 3), Board("c")
    rounds([always, twice, good], 12)
    assert always.asked == MAX_FAILURES and twice.asked > 3 * MAX_FAILURES - 1 and good.asked == 12


def test_of_two_boards_with_one_name_one_is_left_out():
    boards = [Board("same"), Board("same"), Board("other")]
    said = rounds(boards, 10)
    assert len([line for line in said if "two boards have the name same: one is left out" in line]) == 1
    assert len([line for line in said if "has started again" in line]) == 1
    assert min(board.asked for board in boards) <= 1 and boards[2].asked == 10

    boards = [Board("same"), Board("same"), Board("other")]
    said = rounds(boards, 10, ends_after=[(1, 5)])
    assert "board same is gone" in said and boards[0].asked >= 3 and boards[1].asked >= 3, "the other one counts again"


def test_of_boards_that_say_what_cannot_be_a_line_is_left():
    odd, good = Board("odd"), Board("good")
    said: list[str] = []
    link = LocalLink({1: lambda parcel: Parcel("ready", {"name": "odd"}), 2: good.handle})
    roster = Roster(link, said.append)
    roster.wait_for(1)
    assert [answer.about.name for answer in roster.ask(Parcel("train"), 5.0, "round")] == ["good"] and not odd.asked
    assert any(line.startswith("board number 1: its first answer is wrong") for line in said)


class NamedLink(LocalLink):
    """Of boards with keys: `since` is when each started."""

    since = ""

    def nodes(self):
        return dict.fromkeys(self.boards, ("kitchen", self.since))

    def receive(self, messages):
        return {} if self.since == "lost" else super().receive(messages)


def test_a_board_with_a_key_that_starts_again_while_it_is_busy_is_greeted_again():
    said = list[str]()
    link, board = NamedLink({1: Board("a").handle}), Board("a")
    link.boards[1] = board.handle
    roster = Roster(link, said.append)
    roster.wait_for(1)
    link.since = "lost"
    roster.ask(Parcel("train"), 5.0, "round 1")
    assert not any(member.is_free for member in roster.ready)
    link.since = "later"
    roster.wait_for(1, is_free=True)
    assert "board kitchen has started again" in said
    assert len(roster.ask(Parcel("train"), 5.0, "round 2")) == 1


def test_a_fleet_goes_on_with_the_boards_that_are_there_after_a_while():
    said, link = list[str](), LocalLink({1: Board("a").handle})
    roster = Roster(link, said.append)
    roster.wait_for(3, least=1, seconds=40.0)
    assert 40.0 < link.now() < 45.0 and said[-1] == "going on with 1 of 3 boards"
