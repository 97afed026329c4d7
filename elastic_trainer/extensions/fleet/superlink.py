"""Flower's SuperLink in the process of `fleet.py serve`, without what is not for boards.

Flower 1.42 serves three interfaces on one port. Fleet is for boards, and checks their keys. Control runs apps,
registers keys and lists runs, for whoever asks; Runtime is for the ServerApp. Only Fleet is served here: what the
others do for a fleet's server, this process does itself. So nobody can start an app, and none is sent to a board.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvicorn
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from fastapi import FastAPI
from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID, SUPERLINK_NODE_ID
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse
from flwr.proto.task_pb2 import Task
from flwr.server.superlink.linkstate import InMemoryLinkState
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.error import http_error_translator
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.logger import FLOWER_LOGGER
from flwr.supercore.object_store import NoObjectInStoreError, ObjectStoreFactory
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.protobuf.translation import ProtobufTranslationMiddleware
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.grid import HttpGrid
from flwr.superlink.routers.fleet.node_auth import NodeAuthMiddleware
from flwr.superlink.routers.fleet.router import router
from flwr.superlink.servicer.runtime import runtime_handlers
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import Response

from elastic_trainer.errors import UserError, first_line
from elastic_trainer.extensions.fleet.connections import listen, public_keys, tls_files
from elastic_trainer.extensions.fleet.flower_app import FlowerLink
from elastic_trainer.extensions.fleet.settings import FleetSettings

LOG = "superlink.log"
MAX_BODY = 16 << 20  # bytes of a request; Flower sends arrays in pieces of 5 MiB
MAX_REQUESTS = 1000  # at the same time
REFUSALS = 401, 403, 412  # of a request without a key, or with one that Fleet does not know

Say = Callable[[str], object]


class _State(InMemoryLinkState):
    """Flower's record of nodes and messages. A board that was killed may start again before its heartbeat is missed."""

    def activate_node(self, node_id: int, heartbeat_interval: float) -> bool:
        self.deactivate_node(node_id)
        return super().activate_node(node_id, heartbeat_interval)


@contextmanager
def superlink(
    settings: FleetSettings, folder: Path, say: Say = print, check: Callable[[], object] = lambda: None
) -> Iterator[FlowerLink]:
    """Listen for boards while the block runs; the link to them.

    Args:
        settings: where boards reach it.
        folder: of the run; Flower's log is written there.
        say: is given a line on where it listens, and on each address whose request is refused, once a reason.
        check: is called before each pause of the server; may raise an error to stop.

    Raises:
        UserError: the port is in use, or a certificate or key cannot be used.
    """
    _log_to(folder / LOG)
    state = _State(NoOpFederationManager(), ObjectStoreFactory().store())
    for path in public_keys(settings):
        _register(state, path)
    link = FlowerLink(_grid(state), check)
    app = FastAPI(
        openapi_url=None,
        middleware=[
            Middleware(BaseHTTPMiddleware, dispatch=_gate(say)),
            Middleware(BaseHTTPMiddleware, dispatch=http_error_translator),
            Middleware(ProtobufTranslationMiddleware),
            Middleware(NodeAuthMiddleware),
        ],
    )
    app.state.linkstate_factory = SimpleNamespace(state=lambda: state)
    app.state.enable_supernode_auth = settings.node_keys is not None
    app.include_router(router)
    files: dict[str, Any] = tls_files(settings)
    config = uvicorn.Config(app, log_config=None, access_log=False, limit_concurrency=MAX_REQUESTS, ws="none", **files)
    try:
        config.load()
    except OSError as error:
        raise UserError(f"--certificates {settings.certificates}: cannot be used: {first_line(error)}") from error
    server = uvicorn.Server(config)
    with listen(settings.host, settings.port) as socket:
        thread = threading.Thread(target=server.run, args=([socket],), daemon=True)
        thread.start()
        while thread.is_alive() and not server.started:
            time.sleep(0.05)
        say(f"serving at {settings.host}:{settings.port}; run folder {folder}")
        try:
            yield link
        finally:
            server.should_exit = True
            thread.join(5)


def _log_to(path: Path) -> None:
    """Write Flower's messages to this file, but for those that tell of each round, as the fleet's server does."""
    handler = logging.FileHandler(path, delay=True)
    for logger in (FLOWER_LOGGER, logging.getLogger("uvicorn")):
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.WARNING)


def _register(state: InMemoryLinkState, path: Path) -> None:
    """Take a board with this public key under the name of the file. Raises `UserError` if it cannot be used."""
    try:
        key = serialization.load_ssh_public_key(path.read_bytes())
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise ValueError("it is of another kind than ecdsa; docs/fleet.md shows how to make one")
        state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, public_key_to_bytes(key), 0, name=path.stem)
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise UserError(f"--node_keys: {path.name} cannot be used: {first_line(error)}") from error


def _grid(state: InMemoryLinkState) -> HttpGrid:
    """The grid of a run of which this process is the ServerApp."""
    number = state.create_run(None, None, None, {}, NOOP_FEDERATION_ID, None, None, TaskType.SERVER_APP)
    [run] = state.get_run_info(run_ids=[number])
    assert run.primary_task_id is not None, "it has just been made"
    state.claim_task(run.primary_task_id)
    state.activate_task(run.primary_task_id)
    state.task_token_store.clear()  # the task would end without heartbeats
    TaskIdentity.task_id, TaskIdentity.run_id = run.primary_task_id, number  # what messages say of us
    TaskIdentity.node_id = SUPERLINK_NODE_ID
    grid, task = HttpGrid(token="not used"), state.task_store[run.primary_task_id]
    calls: dict[str, Callable[..., Any]] = {
        "GetNodes": runtime_handlers.get_nodes,
        "PushMessages": runtime_handlers.push_messages,
        "PushObject": runtime_handlers.push_object,
        "PullMessages": _pull_messages,
        "PullObject": runtime_handlers.pull_object,
        "ConfirmMessageReceived": runtime_handlers.confirm_message_received,
    }
    client: Any = SimpleNamespace(**{name: partial(call, state=state, task=task) for name, call in calls.items()})
    grid._client = client  # of Flower's SuperLink, which is not there
    grid.set_run(run)
    return grid


def _pull_messages(request: PullAppMessagesRequest, state: InMemoryLinkState, task: Task) -> PullAppMessagesResponse:
    """The replies that have come completely: for the rest of another one Flower's grid waits, and all would with it."""

    def is_complete(number: str) -> bool:
        reply = state.message_ins_id_to_message_res_id.get(number)
        with suppress(NoObjectInStoreError):
            tree = () if reply is None else iterate_object_tree(state.object_store.get_object_tree(reply))
            return all(state.get_object(task.run_id, one.object_id) != b"" for one in tree)
        return True

    numbers = [number for number in request.message_ids if is_complete(number)]
    return runtime_handlers.pull_messages(PullAppMessagesRequest(message_ids=numbers), state=state, task=task)


def _gate(say: Say) -> Callable[[Request, Callable[[Request], Awaitable[Response]]], Awaitable[Response]]:
    """What lets requests to Fleet pass that are not too large, and says who else asks."""
    paths, has_said = {getattr(route, "path", "") for route in router.routes}, set[tuple[str, str]]()

    async def passed(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        why, reply = "", Response(status_code=404)
        if request.method != "POST" or request.url.path not in paths:
            why = "asked for something that is not for boards"
        elif int(request.headers.get("content-length", MAX_BODY + 1)) > MAX_BODY:
            why, reply = f"sent more than {MAX_BODY >> 20} MiB at once", Response(status_code=413)
        else:
            reply = await call_next(request)
            if reply.status_code in REFUSALS:
                why = "its key is not among those in --node_keys"
        said = request.client.host if request.client else "?", why
        if why and said not in has_said and len(has_said) < MAX_REQUESTS:
            has_said.add(said)
            say(f"{said[0]} was refused: {why}")
        return reply

    return passed
