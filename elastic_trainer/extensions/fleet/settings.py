"""The settings of a fleet's server and of its boards as typed values (no TensorFlow here). Each field is a flag.

They are beside those of the run: network, data and training have the flags of main.py (`elastic_trainer.settings`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from elastic_trainer.options import Flag, OneOf, count, duration, flag, flags_of, number, whole_number

FLEET, BOARD, NETWORKING = "Rounds of a fleet", "A board of a fleet", "Connections of a fleet"
SIMULATION = "A simulated fleet"
CHANGES = ("float32", "float16")
PASSES = 1.3  # docs/log/fleet.md compares
PORT = 9092

# fmt: off

@dataclass(frozen=True)
class FleetSettings:
    """What the server of a fleet does, and where it listens.

    Attributes:
        grace: seconds beyond the deadline, for sending and for what a board does before and after training.
        starts_boards: each message to a board starts a process, which takes as long as getting ready did.
        certificates: None: without TLS, on this machine only.
        node_keys: None: any board may join.
    """

    boards: int = flag(2, FLEET, count, "N", is_free=True, help="boards to wait for before the first round")
    min_boards: int = flag(1, FLEET, count, "N", is_free=True, help=(
        "boards with which a fleet goes on after `--resume`, if no others come in the time that a round may take"))
    rounds: int = flag(8, FLEET, whole_number(1, 100_000), "N", is_free=True, help=(
        "rounds of training, after the closed-form head"))
    round_seconds: float | None = flag(None, FLEET, duration, "TIME",
        words="automatic", is_free=True, help=(
        "how long a board trains in a round; automatic: as long as the fastest board takes for `--round_passes`, or "
        "for 800 photos, the slowest for a third of a pass with its head alone, or what the latest round took "
        "besides steps"))
    round_passes: float = flag(PASSES, FLEET, number(0.01, 1000), "N", is_free=True, help=(
        "passes of the fastest board over a mean board's photos in a round; more where a message takes long"))
    changes: str = flag(CHANGES[0], FLEET, OneOf(CHANGES), "FORMAT", help=(
        "how boards send what they changed: `float32`, or `float16`, which is half as much"))
    strategy: str = flag("ElasticStrategy", FLEET, str, "NAME", help=(
        "how changes are averaged: `ElasticStrategy`, each tensor by the boards that trained it, or the name of one of "
        "Flower's strategies, such as `FedAdam` or `Krum`"))
    strategy_args: str = flag("", FLEET, str, "ARGS", words="its own", help=(
        'arguments of that strategy, such as `"eta=0.01 tau=0.001"`'))
    class_names: str | None = flag(None, FLEET, str, "A,B,…", words="the data set's", help=(
        "names of the classes, for a server without photos: the boards then test the models on theirs"))
    host: str = flag("127.0.0.1", NETWORKING, str, "ADDRESS", is_free=True, help=(
        "address on which the server listens for boards; one that other machines can reach needs `--certificates` and "
        "`--node_keys`"))
    port: int = flag(PORT, NETWORKING, whole_number(1, 65_535), "PORT", is_free=True, help="port of the server")
    certificates: Path | None = flag(None, NETWORKING, Path, "DIR", is_free=True, help=(
        "folder with `server.pem` and `server.key` for TLS"))
    node_keys: Path | None = flag(None, NETWORKING, Path, "DIR", is_free=True, help=(
        "take only boards whose public keys are the files `*.pub` in this folder, and name them by these files (needs "
        "`--certificates`)"))
    grace: float = 20.0
    starts_boards: bool = False


@dataclass(frozen=True)
class BoardSettings:
    """How a board joins a fleet."""

    superlink: str = flag(f"127.0.0.1:{PORT}", NETWORKING, str, "HOST:PORT", help="address of the server")
    root_certificates: Path | None = flag(None, NETWORKING, Path, "FILE", help=(
        "the `ca.crt` of the server; without it, a board joins only a server on the same machine"))
    private_key: Path | None = flag(None, NETWORKING, Path, "FILE", help=(
        "key of this board, for a server with `--node_keys`"))
    name: str | None = flag(None, BOARD, str, "NAME", words="the name of the machine", help=(
        "name of the board in the server's records, where its key gives it none; two boards must not have the same"))
    slowdown: float = flag(1.0, BOARD, number(1, 1000), "TIMES", help=(
        "pretend to be this many times slower, to try a fleet on one machine"))


@dataclass(frozen=True)
class SimulationSettings:
    """Boards that are simulated."""

    clients: int = flag(10, SIMULATION, whole_number(1, 10_000), "N", help="boards")
    slowest: float = flag(6.0, SIMULATION, number(1, 10_000), "TIMES", help=(
        "how many times slower than this machine the slowest board is; the fastest is as fast, the others lie between"))
    uneven: float | None = flag(None, SIMULATION, number(0.001, 1000), "ALPHA", words="even", help=(
        "divide each class unevenly, by a Dirichlet distribution of this concentration: 0.1 is very uneven"))


# fmt: on
SIMULATION_FLAGS: dict[str, Flag] = flags_of(SimulationSettings)
FLEET_FLAGS: dict[str, Flag] = flags_of(FleetSettings)
BOARD_FLAGS: dict[str, Flag] = flags_of(BoardSettings)
