"""Flower's tasks, done in this process: the ServerApp of `fleet.py serve` and the ClientApp of `fleet.py join`.

Flower gives a task to whoever knows the secret of its SuperLink or SuperNode on the same machine. Normally that is its
SuperExec, which starts a process for each message and runs there the app that the other side has sent. Here the
long-lived process takes the tasks: the network stays compiled, and no code that was sent is run.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from subprocess import Popen
from typing import Any, NamedTuple

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.cli.build import build_fab_from_disk
from flwr.common.constant import SubStatus
from flwr.common.serde import fab_to_proto, run_from_proto
from flwr.proto.control_pb2 import RegisterNodeRequest, StartRunRequest
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullTaskInputRequest, SendTaskHeartbeatRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.logger import FLOWER_LOGGER
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from elastic_trainer.errors import UserError, first_line
from elastic_trainer.extensions.fleet.flower_app import POLL_SECONDS, FlowerLink, Handle, client_app
from elastic_trainer.extensions.fleet.messages import Parcel

ACQUIRE = "/flwr.proto.Runtime/AcquireTask"  # the call that needs the secret


class Runtime(NamedTuple):
    """One of Flower's two processes on this machine, which hands out tasks.

    Attributes:
        address: of its Runtime API, HOST:PORT.
        secret: that it was started with.
        process: ends when it can go on no longer.
        certificate: that it must show; None: it has no TLS.
    """

    address: str
    secret: bytes
    process: Popen[bytes]
    certificate: Path | None = None

    def client(self, component: str, *interceptors: Any, kind: type[Any] = RuntimeHttpClient) -> Any:
        """A client of this kind. Its calls raise an error at once where nobody listens."""
        return kind.from_server_address(
            server_address=self.address,
            insecure=self.certificate is None,
            root_certificates=None if self.certificate is None else self.certificate.read_bytes(),
            interceptors=[RuntimeVersionHttpInterceptor(component_name=component), *interceptors],
        )

    def tokens(self, kind: TaskType, check: Callable[[], object] = lambda: None) -> Iterator[str]:
        """The token of each task as it comes, until the process ends; `check` is called while waiting."""
        proof = SuperExecAuthHttpInterceptor(master_secret=self.secret, protected_methods=frozenset({ACQUIRE}))
        with closing(self.client("SuperExec", proof)) as client:
            while self.process.poll() is None:
                check()
                try:
                    found = client.AcquireTask(AcquireTaskRequest(supported_task_types=[kind]))
                except httpx.HTTPError:  # it is about to start or to end
                    found = None
                if found is not None and found.token:
                    yield found.token
                else:
                    time.sleep(POLL_SECONDS)


@contextmanager
def _is_alive(client: RuntimeHttpClient) -> Iterator[None]:
    """Let Flower know that its task is being done, while the block runs."""

    def beat() -> bool:
        with suppress(httpx.HTTPError):  # what it means is seen where the task goes on
            client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
        return True

    heartbeat = HeartbeatSender(beat)
    heartbeat.start()
    try:
        yield
    finally:
        heartbeat.stop()


# --- a board ----------------------------------------------------------------------------------------------------------


def parcels(runtime: Runtime, handle: Handle) -> Iterator[Parcel]:
    """Each message to this board, after `handle` has answered it, until its SuperNode ends."""
    handled: list[Parcel] = []

    def noted(parcel: Parcel) -> Parcel:
        handled.append(parcel)
        return handle(parcel)

    app = client_app(lambda context: noted)
    for token in runtime.tokens(TaskType.CLIENT_APP):
        handled.clear()
        with closing(runtime.client("flwr-clientapp", RuntimeTokenHttpInterceptor(token))) as client:
            try:
                with _is_alive(client):
                    message, context, _, _ = pull_task_input(client)
                    push_message(client, app(message, context), context)
                    push_task_output(client, context, SubStatus.COMPLETED, "")
            except (httpx.HTTPError, RuntimeError) as error:  # the SuperNode ends, or the message is gone
                print(f"a message could not be answered: {first_line(error)}", flush=True)
                continue
        yield from handled


# --- the server -------------------------------------------------------------------------------------------------------


def start_app(runtime: Runtime, app: Path, keys: Iterable[Path]) -> None:
    """Register the boards' public keys under the names of their files, and start the app in folder `app`.

    Raises:
        UserError: a key cannot be used, or Flower does not start the app.
    """
    with closing(runtime.client("flwr", kind=ControlHttpClient)) as client:
        for path in keys:
            try:
                key = serialization.load_ssh_public_key(path.read_bytes())
                if not isinstance(key, ec.EllipticCurvePublicKey):
                    raise ValueError("it is of another kind than ecdsa; docs/fleet.md shows how to make one")
                client.RegisterNode(RegisterNodeRequest(public_key=public_key_to_bytes(key), name=path.stem))
            except (OSError, ValueError, UnsupportedAlgorithm, httpx.HTTPError) as error:
                raise UserError(f"--node_keys: {path.name} cannot be used: {first_line(error)}") from error
        content = build_fab_from_disk(app)
        fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
        try:
            client.StartRun(StartRunRequest(fab=fab_to_proto(fab)))
        except httpx.HTTPError as error:
            raise UserError(f"Flower does not start the fleet's app: {first_line(error)}") from error


@contextmanager
def server_link(runtime: Runtime, token: str) -> Iterator[FlowerLink]:
    """The link of the ServerApp's task with this `token`, which is done while the block runs."""
    client = runtime.client("flwr-serverapp", RuntimeTokenHttpInterceptor(token))
    FLOWER_LOGGER.setLevel("WARNING")  # strategies tell of each round, and so does the fleet's server
    with closing(client), _is_alive(client):
        task = client.PullTaskInput(PullTaskInputRequest())
        grid = HttpGrid(runtime.address, token=token)
        grid._client = client  # its own would try for ever to reach a SuperLink that has ended
        grid.set_run(run_from_proto(task.run))
        TaskIdentity.task_id, TaskIdentity.run_id = task.task_id, task.run.run_id  # what messages say of us
        TaskIdentity.node_id = task.context.node_id
        yield FlowerLink(grid, runtime.process)
