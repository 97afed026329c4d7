#!/usr/bin/env python
"""One model from many boards: `python fleet.py serve` on one machine, `python fleet.py join` on each board.

The photos stay on the boards. Each board trains what it can in the time of a round (elastic training), and the server
averages what they changed. Flower carries the messages. docs/fleet.md shows all of it step by step.
"""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

import utils
from elastic_trainer.cli.commands import TrainCommand
from elastic_trainer.errors import Stopped, UserError
from elastic_trainer.extensions.fleet.command_line import (
    JoinCommand,
    ServeCommand,
    board_command,
    parse_fleet,
    sent_words,
)
from elastic_trainer.extensions.fleet.connections import check_board, check_flower, check_server
from elastic_trainer.machine import frozen_gc, load_tensorflow
from elastic_trainer.runs.config import custom_network_record
from elastic_trainer.runs.reader import is_finished
from elastic_trainer.settings import BEST_MODEL

if TYPE_CHECKING:
    import numpy as np

    from elastic_trainer.datasets.image_data import ImageData
    from elastic_trainer.extensions.fleet.roster import Link
    from elastic_trainer.extensions.fleet.rounds import BoardSetup

Check = Callable[[], object]


def main() -> None:
    """Run one of the commands. Raises `UserError` for what the user can fix, and `Stopped` after a signal."""
    command = parse_fleet()
    if isinstance(command, JoinCommand):
        check_flower()
        check_board(command.board)
        join(command)
        return
    if command.simulation is None:
        check_flower()
        check_server(command.fleet)
    serve(command)


def say(line: str) -> None:
    """Print a line at once, also into a file and above a progress bar."""
    tqdm.write(line)
    sys.stdout.flush()


# --- the server -------------------------------------------------------------------------------------------------------


def serve(command: ServeCommand, link: Link | None = None) -> None:
    """Run a fleet, new or continued, of real boards or simulated ones.

    Args:
        command: what is asked for.
        link: to the boards; None: through a SuperLink of its own.
    """
    run, strategy = command.training.run, None
    if command.simulation is None:
        from elastic_trainer.extensions.fleet.strategy import strategy_of

        strategy = strategy_of(command.fleet.strategy, command.fleet.strategy_args)
    for text in command.training.warnings:
        utils.warn(text)
    if run.resume and is_finished(run.folder):
        raise UserError(f"--resume: {run.folder} is finished; give another --run_name")
    load_tensorflow()
    import data
    import models
    from elastic_trainer.datasets.sources import class_names
    from elastic_trainer.extensions.fleet.records import Records
    from elastic_trainer.extensions.fleet.roster import Roster
    from elastic_trainer.extensions.fleet.server import FleetServer
    from elastic_trainer.extensions.fleet.simulated import split
    from elastic_trainer.networks.tensors import tensor_names
    from elastic_trainer.runs.folder import check_run_folder, run_folder
    from elastic_trainer.runs.stop_signals import StopSignals

    check_run_folder(run.logdir, run.run_name, run.overwrite, run.resume)
    images, network, dataset = command.training.data, command.training.network, None
    if command.class_names is None:
        network = network.with_classes(len(class_names(images)))
        dataset = data.load(images, network.input_size, network.batch_size, network.seed, network.num_classes)
        _leave_out_test_folder(dataset)
    names = command.class_names or [*dataset.class_names]  # type: ignore[union-attr]  # one of them is there
    parts = []
    if command.simulation is not None:
        wanted = command.simulation.clients, command.simulation.uneven, network.batch_size, network.seed
        parts = split(dataset.training_labels, *wanted)  # type: ignore[union-attr]  # it has photos
    model = models.build(network, names)
    custom = custom_network_record(model, network, run)
    hello = {"words": sent_words(command.training, len(names)), "class_names": names, "network": custom}
    on_boards = {"training_images": "on the boards", "test_images": "on the boards"}
    record = {**(on_boards if dataset is None else dataset.record()), "class_names": names}
    stop = StopSignals()
    signals = stop if link is None else nullcontext()  # Flower ends its own processes
    with run_folder(run.logdir, run.run_name, run.overwrite, run.resume) as folder, signals:
        config = {**command.config, "num_classes": len(names), "images": record, "network": custom}
        records, rate = Records(folder, config, tensor_names(model)), command.training.training.learning_rate
        how = f"continue with: {shlex.join(['python', 'fleet.py', 'serve', '--resume', str(folder)])}"
        boards: AbstractContextManager[Link]
        if link is not None:
            boards = nullcontext(link)
        elif command.simulation is None:
            from elastic_trainer.extensions.fleet.superlink import superlink

            boards = superlink(command.fleet, folder, say, stop.check)
        else:
            boards = _simulated(command, dataset, parts, folder, stop.check)
            how = "a simulation cannot be continued, start it again"
        try:
            with boards as connected:
                roster = Roster(connected, say)
                server = FleetServer(roster, model, command.fleet, rate, hello, records, dataset, strategy)
                server.run()
                server.say_goodbye()
        except Stopped as stopped:
            raise Stopped(stopped.number, f"stopped; {how}") from None
        summary = records.finish(server.seconds)
    first, last = summary["start_accuracy"] or 0.0, summary["final_accuracy"]
    say(
        f"accuracy {first:.1%} with the first head, {last:.1%} in the end ({folder / BEST_MODEL}), after "
        f"{summary['train_seconds']:.1f} s of rounds; the least trained tensor trained in {summary['coverage']:.0%} of "
        f"all boards' rounds; {(summary['bytes_down'] + summary['bytes_up']) / 1e6:.1f} MB sent"
    )


@contextmanager
def _simulated(
    command: ServeCommand, dataset: Any, parts: Sequence[np.ndarray], folder: Path, check: Check
) -> Iterator[Link]:
    """The link to simulated boards."""
    from elastic_trainer.extensions.fleet.simulated import simulation, slowdowns

    settings = command.simulation
    assert settings is not None, "it simulates"
    training = command.training.with_classes(dataset.num_classes).choose(batch_size=dataset.batch_size)
    setup = _board_setup(training, lambda *_: dataset)
    slower = slowdowns(settings.clients, settings.slowest)
    say(f"simulating {settings.clients} boards; run folder {folder}")
    with tqdm(total=settings.clients * command.fleet.rounds, desc="training", unit="board") as bar, frozen_gc():

        def has_trained(line: str) -> None:
            check()
            bar.update()

        yield simulation(setup, parts, slower.tolist(), has_trained)


def _board_setup(training: TrainCommand, load: Callable[[TrainCommand, float | None], Any]) -> BoardSetup:
    """The network of a board, the photos that `load` returns, and the timing table."""
    import models
    from elastic_trainer.cli.resolve import resolve
    from elastic_trainer.extensions.fleet.rounds import BoardSetup

    model = models.build(training.network)
    prepared = resolve(training, model, load)
    assert prepared.table is not None, "the scheme is elastic"
    return BoardSetup(model, prepared.data, prepared.table, prepared.command.training, prepared.memory)


# --- a board ----------------------------------------------------------------------------------------------------------


def join(command: JoinCommand) -> None:
    """Train for a server until it has finished."""
    load_tensorflow()
    from elastic_trainer.extensions.fleet.flower_app import real_board
    from elastic_trainer.extensions.fleet.supernode import take_part

    folder, settings = command.folder, command.board
    board = real_board(command, setup)
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        say(f"board {command.name}: joins the fleet at {settings.superlink}")
        end = take_part(settings, board.handle, say, board.get_ready)
        has_saved = board.save_model(end.arrays, folder / BEST_MODEL)
        say(f"the fleet has finished{f'; its best model is in {folder / BEST_MODEL}' if has_saved else ''}")
    finally:
        signal.signal(signal.SIGTERM, before)


def _stop(number: int, frame: Any) -> None:
    raise Stopped(number, "this board has left the fleet")


def setup(command: JoinCommand, words: Sequence[str], class_names: Sequence[str]) -> BoardSetup:
    """The network of the server, the photos of this board, and its timing table."""
    import data

    def load(training: TrainCommand, images_mb: float | None) -> ImageData:
        network = training.network
        sizes = network.input_size, network.batch_size, network.seed
        dataset = data.load(training.data, *sizes, kept_mb=images_mb)
        _leave_out_test_folder(dataset)
        dataset.follow_classes(class_names)
        return dataset

    training = board_command(command, words)
    try:
        return _board_setup(training, load)
    except UserError as error:
        raise UserError(f"{error} (--batch_size is a flag of fleet.py serve, the others of fleet.py join)") from error


def _leave_out_test_folder(dataset: Any) -> None:
    """Leave out the images that would test the best model after training: a fleet chooses and tests by the others."""
    if dataset.held_out is not None:
        say("a fleet leaves out the photos of the test folder; main.py --evaluate tests its model on them")
        dataset.held_out = None


if __name__ == "__main__":
    utils.run_cli(main)
