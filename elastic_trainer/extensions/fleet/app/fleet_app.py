"""The Flower app: both ends of the network, each a messenger of the long-lived process beside it.

Flower 1.42 starts a new process for every message that a board gets. It would load TensorFlow (8 s) and compile the
step again in every round. So the ClientApp passes the message on to `fleet.py join`, and the ServerApp, which starts
once, passes on what `fleet.py serve` wants to send. They talk over a socket of this machine, with a key that only their
environment has.

    fleet.py serve <-> ServerApp <-> SuperLink <-> network <-> SuperNode <-> ClientApp <-> fleet.py join

Flower bundles this folder and sends it to the boards, so it imports the rest of the project from their checkout.
"""

from __future__ import annotations

import os
from contextlib import closing
from multiprocessing.connection import Client, Connection

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from elastic_trainer.extensions.fleet.link import ADDRESS, KEY
from elastic_trainer.extensions.fleet.messages import Parcel, failed

client_app = ClientApp()
server_app = ServerApp()


def _connection() -> Connection:
    """A connection to the process that this one is the messenger of."""
    return Client(os.environ[ADDRESS], authkey=bytes.fromhex(os.environ[KEY]))


def _record(content: bytes) -> RecordDict:
    return RecordDict({"parcel": ArrayRecord({"parcel": Array(np.frombuffer(content, np.uint8))})})


def _content(message: Message) -> bytes:
    return message.content.array_records["parcel"]["parcel"].numpy().tobytes()


@client_app.query()
def pass_on(message: Message, context: Context) -> Message:
    """Let the board's process answer. Raises an error, which Flower reports to the server, if there is none."""
    with closing(_connection()) as link:
        link.send_bytes(_content(message))
        return Message(_record(link.recv_bytes()), reply_to=message)


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    """Do what the server's process asks for, until it ends."""
    with closing(_connection()) as link:
        while True:
            try:
                request = Parcel.from_bytes(link.recv_bytes())
            except EOFError:
                return
            link.send_bytes(_done(grid, request).to_bytes())


def _done(grid: Grid, request: Parcel) -> Parcel:
    """The result of a request: the nodes that are online, the number of a message, or replies to messages."""
    values = request.values
    try:
        if request.kind == "nodes":
            return Parcel("nodes", {"nodes": [*grid.get_node_ids()]})
        if request.kind == "send":
            record = _record(request.arrays["parcel"].tobytes())
            [number] = grid.push_messages([Message(record, values["node"], "query", ttl=values["ttl"])])
            return Parcel("sent", {"message": number})
        replies = [*grid.pull_messages(values["messages"])]
    except Exception as error:  # of Flower or the network, which the server reports
        return failed(f"{type(error).__name__}: {error}")
    parcels, errors = {}, {}
    for reply in replies:
        number = reply.metadata.reply_to_message_id
        if reply.has_error():
            errors[number] = f"{reply.error.reason} (Flower's error {reply.error.code})"
        else:
            parcels[number] = np.frombuffer(_content(reply), np.uint8)
    return Parcel("replies", {"errors": errors}, parcels)
