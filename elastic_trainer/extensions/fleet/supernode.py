"""A board's connection to a server: what Flower's SuperNode does, in the process of `fleet.py join`.

A SuperNode starts a process for each message, which runs there the app that the server has sent. Here the long-lived
process answers: the network stays compiled, and no code that was sent is run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PullMessagesResponse,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectPushError,
    pull_and_inflate_object_from_tree,
    push_objects,
)
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supercore.retry import RetryInvoker, exponential
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from elastic_trainer.errors import UserError, first_line
from elastic_trainer.extensions.fleet.flower_app import Handle, answer
from elastic_trainer.extensions.fleet.messages import Parcel
from elastic_trainer.extensions.fleet.settings import BoardSettings

POLL_SECONDS = 1.0  # between two looks for messages, or for a server
RETRY_SECONDS = 60.0  # in which a connection that is lost may come back
Say = Callable[[str], object]


def take_part(
    settings: BoardSettings, handle: Handle, say: Say, afterwards: Callable[[], object] = lambda: None
) -> Parcel:
    """Answer what a server asks by `handle`, until it sends a message of the kind "end", which is returned.

    `afterwards` is called after each answer to "train". A server that has gone is waited for.

    Raises:
        UserError: the server has other certificates, or does not take this board's key.
    """
    key = generate_key_pairs()[0] if settings.private_key is None else _private_key(settings.private_key)
    has_said = False
    while True:
        try:
            for parcel in _parcels(settings, key, handle):
                has_said = False
                if parcel.kind == "end":
                    return parcel
                if parcel.kind == "train":
                    afterwards()
        except (httpx.HTTPError, ObjectPullError, ObjectPushError, ValueError) as error:
            if not has_said:
                say(f"waiting for the server at {settings.superlink} ({first_line(error)})")
            has_said = True
            time.sleep(POLL_SECONDS)


def _private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Raises `UserError` for other files."""
    try:
        key = serialization.load_ssh_private_key(path.read_bytes(), None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError("it is of another kind than ecdsa")
    except (OSError, TypeError, ValueError, UnsupportedAlgorithm) as error:
        why = f"cannot be used ({first_line(error)}); docs/fleet.md shows how to make one"
        raise UserError(f"--private_key {path}: {why}") from error
    return key


def _parcels(settings: BoardSettings, key: ec.EllipticCurvePrivateKey, handle: Handle) -> Iterator[Parcel]:
    """Each message to this board, after `handle` has answered it.

    Raises:
        UserError: the server does not take this board's key.
        httpx.HTTPError: the connection is lost, or the server has started again.
        ObjectPullError, ObjectPushError: a message, or what it asks for, is gone.
        ValueError: another program answers there.
    """
    authority, public_key = settings.root_certificates, public_key_to_bytes(key.public_key())
    connect = partial(
        FleetHttpClient.from_server_address,
        settings.superlink,
        authority is None,
        None if authority is None else authority.read_bytes(),
        [NodeAuthHttpInterceptor(key, key.public_key())],
    )
    retry = RetryInvoker(partial(exponential, max_delay=20), httpx.TransportError, None, RETRY_SECONDS)
    with connect() as at_once, connect(retry_invoker=retry) as client:
        try:
            if settings.private_key is None:
                with suppress(httpx.HTTPStatusError):  # it knows this key, or wants another one, as it says next
                    at_once.RegisterNode(RegisterNodeFleetRequest(public_key=public_key))
            asked = ActivateNodeRequest(public_key=public_key, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
            node = Node(node_id=at_once.ActivateNode(asked).node_id)
        except httpx.HTTPError as error:
            _check_refusal(settings, error)
            raise
        heartbeat = HeartbeatSender(lambda: _beat(at_once, node))
        heartbeat.start()
        try:
            while True:
                found = client.PullMessages(PullMessagesRequest(node=node))
                if found.messages_list:
                    yield _answered(client, node, found, handle)
                else:
                    time.sleep(POLL_SECONDS)
        finally:
            heartbeat.stop()
            with suppress(httpx.HTTPError):
                at_once.DeactivateNode(DeactivateNodeRequest(node_id=node.node_id))


def _check_refusal(settings: BoardSettings, error: httpx.HTTPError) -> None:
    """Raise a `UserError` if server and board do not fit, and not where there is no server, which passes."""
    server, authority, why = settings.superlink, settings.root_certificates, ""
    if isinstance(error, httpx.HTTPStatusError):
        if error.response.status_code == httpx.codes.UNAUTHORIZED:
            why = f"--superlink {server}: the server's clock differs from this board's; set both"
        elif error.response.status_code == httpx.codes.PRECONDITION_FAILED:
            why = (
                f"--private_key {settings.private_key or 'none'}: the server does not know this key; the server's "
                "--node_keys must have its .pub file when it starts (docs/fleet.md)"
            )
    elif "CERTIFICATE_VERIFY_FAILED" in str(error):
        why = (
            f"--root_certificates {authority}: does not vouch for the server at {server} ({first_line(error)}); copy "
            "the server's ca.crt again"
        )
    elif "SSL" in str(error):
        why = (
            f"--root_certificates {authority}: cannot be used with the server at {server} ({first_line(error)}); a "
            "server without --certificates needs none"
        )
    elif authority is None and isinstance(error, httpx.RemoteProtocolError):
        why = f"--superlink {server}: the server uses TLS; --root_certificates must name its ca.crt"
    if why:
        raise UserError(why) from error


def _beat(client: FleetHttpClient, node: Node) -> bool:
    """Tell the server that this board is there, while it trains; whether that could be told."""
    with suppress(httpx.HTTPError, ValueError):
        client.SendNodeHeartbeat(SendNodeHeartbeatRequest(node=node, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL))
        return True
    return False


def _answered(client: FleetHttpClient, node: Node, found: PullMessagesResponse, handle: Handle) -> Parcel:
    """The message that was found, once its answer is sent."""
    [tree], run = found.message_object_trees, found.messages_list[0].metadata.run_id
    message = pull_and_inflate_object_from_tree(
        tree,
        make_pull_object_fn_protobuf(client.PullObject, node, run),
        make_confirm_message_received_fn_protobuf(client.ConfirmMessageReceived, node, run),
        return_type=Message,
    )
    message.metadata.__dict__["_message_id"] = tree.object_id  # as Flower's own ClientApp does
    handled = Parcel("")

    def noted(parcel: Parcel) -> Parcel:
        nonlocal handled
        handled = parcel
        return handle(parcel)

    reply = answer(message, noted)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    with no_object_id_recompute():
        sent = client.PushMessages(
            PushMessagesRequest(
                node=node,
                messages_list=[message_to_proto(remove_content_from_message(reply))],
                message_object_trees=[get_object_tree(reply)],
            )
        )
        push = make_push_object_fn_protobuf(client.PushObject, node, run, sent.session_id)
        push_objects(get_all_nested_objects(reply), push, object_ids_to_push={*sent.objects_to_push})
    return handled
