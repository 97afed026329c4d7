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
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

import utils
from elastic_trainer.errors import Stopped, UserError
from elastic_trainer.extensions.fleet.command_line import (
    JoinCommand,
    ServeCommand,
    board_command,
    parse_fleet,
    sent_words,
)
from elastic_trainer.extensions.fleet.processes import check_board, check_flower, check_server, superlink, take_part
from elastic_trainer.machine import frozen_gc, load_tensorflow
from elastic_trainer.networks.names import is_custom_model
from elastic_trainer.runs.config import compare_networks, network_record
from elastic_trainer.runs.reader import is_finished
from elastic_trainer.settings import BEST_MODEL


def say(line: str) -> None:
    """Print a line at once, also into a file and beside a progress bar."""
    tqdm.write(line)
    sys.stdout.flush()


def main() -> None:
    """Run one of the commands."""
    command = parse_fleet()
    if isinstance(command, ServeCommand) and command.simulation is not None:
        serve(command)
        return
    check_flower()
    if isinstance(command, ServeCommand):
        check_server(command.fleet)
        serve(command)
    else:
        check_board(command.board)
        join(command)


# --- the server -------------------------------------------------------------------------------------------------------


def serve(command: ServeCommand) -> None:
    """Run a fleet, new or continued. Raises `UserError` for what the user can fix, and `Stopped` after a signal."""
    run = command.training.run
    for text in command.training.warnings:
        utils.warn(text)
    if run.resume and is_finished(run.folder):
        raise UserError(f"--resume: {run.folder} is finished; give another --run_name")
    load_tensorflow()
    import data
    import models
    from elastic_trainer.datasets.sources import class_names
    from elastic_trainer.extensions.fleet.records import Records
    from elastic_trainer.extensions.fleet.server import FleetServer
    from elastic_trainer.networks.tensors import tensor_names
    from elastic_trainer.runs.folder import check_run_folder, run_folder
    from elastic_trainer.runs.stop_signals import StopSignals

    check_run_folder(run.logdir, run.run_name, run.overwrite, run.resume)
    images, network, dataset = command.training.data, command.training.network, None
    if command.has_photos:
        network = network.with_classes(len(class_names(images)))
        dataset = data.load(images, network.input_size, network.batch_size, network.seed, network.num_classes)
        _keep_for_later(dataset)
    names = command.class_names or [*dataset.class_names]  # type: ignore[union-attr]  # one of them is there
    parts = _parts(command, dataset)
    model = models.build(network, names)
    made = network_record(model) if is_custom_model(network.model_name) else None
    if made is not None:
        compare_networks(made, run, network)
    hello = {"words": sent_words(command.training, len(names)), "class_names": names, "network": made}
    with run_folder(run.logdir, run.run_name, run.overwrite, run.resume) as folder:
        config = {**command.config, "num_classes": len(names), "images": _images(names, dataset), "network": made}
        records = Records(folder, config, tensor_names(model))
        with StopSignals() as stop:
            try:
                with _boards(command, model, dataset, parts, folder, stop.check) as (link, clock):
                    rate = command.training.training.learning_rate
                    server = FleetServer(
                        link, model, command.fleet, rate, hello, records, dataset, say, stop.check, clock
                    )
                    server.run()
                    server.say_goodbye(folder / BEST_MODEL)
            except Stopped as stopped:
                how = f"continue with: {shlex.join(['python', 'fleet.py', 'serve', '--resume', str(folder)])}"
                if command.simulation is not None:
                    how = "a simulation cannot be continued, start it again"
                raise Stopped(stopped.number, f"stopped; {how}") from None
        summary = records.finish(config, server.seconds)
    say(
        f"accuracy {summary['final_accuracy']:.1%} (best {summary['best_accuracy']:.1%}: {folder / BEST_MODEL}) after "
        f"{summary['train_seconds']:.1f} s of rounds; the least trained tensor trained in {summary['coverage']:.0%} of "
        f"all boards' rounds; {(summary['bytes_down'] + summary['bytes_up']) / 1e6:.1f} MB sent"
    )


def _parts(command: ServeCommand, dataset: Any) -> list[Any]:
    """The photos of each simulated board, see `simulated.split`. Raises `UserError` if there are too few."""
    from elastic_trainer.extensions.fleet.simulated import split

    simulation = command.simulation
    if simulation is None:
        return []
    labels, fewest, seed = dataset.training_labels, dataset.batch_size, command.training.network.seed
    try:
        return split(labels, simulation.clients, simulation.uneven, fewest, seed)
    except ValueError as error:
        raise UserError(f"--clients {simulation.clients}: {error}; give fewer, or a smaller --batch_size") from error


@contextmanager
def _boards(
    command: ServeCommand, model: Any, dataset: Any, parts: Sequence[Any], folder: Path, check: Callable[[], object]
) -> Iterator[tuple[Any, Any]]:
    """The link to the boards, real or simulated, and the clock of their rounds."""
    from elastic_trainer.extensions.fleet.roster import Clock

    fleet, simulation = command.fleet, command.simulation
    if simulation is None:
        with superlink(fleet, folder, check) as link:
            say(f"serving at {fleet.host}:{fleet.port}; run folder {folder}")
            yield link, Clock()
        return
    import models
    from elastic_trainer.cli.choices import with_table
    from elastic_trainer.extensions.fleet import simulated
    from elastic_trainer.extensions.fleet.client import Made
    from elastic_trainer.timing.memory_check import TracedSteps

    network = command.training.network.with_classes(len(dataset.class_names))
    training, table, _ = with_table(command.training.with_classes(dataset.num_classes), TracedSteps(model, network))
    assert table is not None, "the scheme is elastic"
    made = Made(models.build(network), dataset, table, training.training)
    slower = simulated.slowdowns(simulation.clients, simulation.slowest).tolist()
    say(f"simulating {simulation.clients} boards; run folder {folder}")
    with tqdm(total=simulation.clients * fleet.rounds, desc="training", unit="board") as bar, frozen_gc():

        def has_trained(line: str) -> None:
            check()
            bar.update()

        yield simulated.simulation(made, parts, slower, has_trained)


def _images(names: Sequence[str], dataset: Any) -> dict[str, Any]:
    """What config.json keeps of the images."""
    own = {"training_images": "on the boards", "test_images": "on the boards"} if dataset is None else dataset.record()
    return {**own, "class_names": [*names]}


# --- a board ----------------------------------------------------------------------------------------------------------


def join(command: JoinCommand) -> None:
    """Train for a server until it has finished. Raises `UserError` for what the user can fix."""
    load_tensorflow()
    from elastic_trainer.extensions.fleet.client import Board

    folder = command.logdir / "boards" / command.name
    board = Board(command.name, lambda words, names: _made(command, words, names), command.board.slowdown, say)
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        say(f"board {command.name}: joins the fleet at {command.board.superlink}; log in {folder}")
        _keep(board, take_part(command.board, folder, board.handle, say, board.get_ready), folder)
    finally:
        signal.signal(signal.SIGTERM, before)


def _stop(number: int, frame: Any) -> None:
    raise Stopped(number, "this board has left the fleet")


def _made(command: JoinCommand, words: Sequence[str], class_names: Sequence[str]) -> Any:
    """The network of the server, the photos of this board, and its timing table."""
    import data
    import models
    from elastic_trainer.cli.choices import with_memory, with_table
    from elastic_trainer.extensions.fleet.client import Made
    from elastic_trainer.timing.memory_check import TracedSteps

    training = board_command(command, words)
    model = models.build(training.network)
    steps = TracedSteps(model, training.network)
    try:
        training, freed_mb = with_memory(training, steps)
    except UserError as error:
        raise UserError(f"{error} (--batch_size is a flag of fleet.py serve, the others of fleet.py join)") from error
    training, table, freed_mb = with_table(training, steps, freed_mb=freed_mb)
    assert table is not None, "the scheme is elastic"
    network = training.network
    sizes = network.input_size, network.batch_size, network.seed
    dataset = data.load(training.data, *sizes, kept_mb=training.images_mb)
    _keep_for_later(dataset)
    dataset.follow_classes(class_names)
    return Made(model, dataset, table, training.training, freed_mb)


def _keep_for_later(dataset: Any) -> None:
    """Leave out the images that would test the best model after training: a fleet chooses and tests by the others."""
    if dataset.held_out is not None:
        say("a fleet leaves out the photos of the test folder; main.py --evaluate tests its model on them")
        dataset.held_out = None


def _keep(board: Any, message: Any, folder: Path) -> None:
    """Save the fleet's best model on this board."""
    path = folder / BEST_MODEL
    if board.save_model(message.arrays, path):
        say(f"the fleet has finished; its best model is in {path}")
    else:
        say("the fleet has finished")


if __name__ == "__main__":
    utils.run_cli(main)
