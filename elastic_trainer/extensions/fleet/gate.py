"""The door of a fleet's server: of what Flower's SuperLink offers, other machines reach only what boards need.

Flower 1.42 serves three interfaces on one port. Fleet is for boards, and checks their keys. Control runs apps,
registers keys and lists runs, for whoever asks; Runtime hands out tasks. So the SuperLink listens on this machine
alone, and this proxy passes on requests to Fleet.
"""

from __future__ import annotations

import contextlib
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from elastic_trainer.errors import UserError

FLEET = re.compile(r"/v1/fleet/[a-z-]+")  # the only paths that are passed on
MAX_BODY = 16 << 20  # bytes of a request; Flower sends arrays in pieces of 5 MiB
MAX_REQUESTS = 1000  # at the same time
UPSTREAM_SECONDS = 60.0
REFUSALS = 401, 403, 412  # of a request without a key, or with one that Fleet does not know
HOP = {"host", "connection", "content-length", "transfer-encoding", "keep-alive", "upgrade"}  # of one connection only
Say = Callable[[str], object]


class Gate:
    """Passes requests to Fleet on to a SuperLink.

    Args:
        upstream: URL of the SuperLink.
        certificate: that it shows; None: it has no TLS.
        say: is given a line on each address whose request is refused, once a reason.
    """

    def __init__(self, upstream: str, certificate: Path | None, say: Say) -> None:
        self._say, self._has_said, self._upstream = say, set[tuple[str, str]](), upstream
        verify: ssl.SSLContext | bool = False
        if certificate is not None:
            verify = ssl.create_default_context(cafile=certificate)
        self._client = httpx.AsyncClient(verify=verify, timeout=UPSTREAM_SECONDS, trust_env=False)

    async def forward(self, request: Request) -> Response:
        """The SuperLink's reply, or a refusal."""
        host, path = request.client.host if request.client else "?", request.scope["path"]
        if request.method != "POST" or FLEET.fullmatch(path) is None:
            self._refused(host, "asked for something that is not for boards")
            return Response(status_code=404)
        body = bytearray()
        try:
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY:
                    self._refused(host, f"sent more than {MAX_BODY >> 20} MiB at once")
                    return Response(status_code=413)
            reply = await self._client.post(
                self._upstream + path, content=bytes(body), headers=_end_to_end(request.headers)
            )
        except ClientDisconnect:
            return Response(status_code=400)
        except httpx.HTTPError:
            return Response(status_code=503)  # boards try again
        if reply.status_code in REFUSALS:
            self._refused(host, "its key is not among those in --node_keys")
        return Response(reply.content, reply.status_code, _end_to_end(reply.headers))

    def _refused(self, host: str, why: str) -> None:
        if (host, why) not in self._has_said and len(self._has_said) < MAX_REQUESTS:
            self._has_said.add((host, why))
            self._say(f"{host} was refused: {why}")


def _end_to_end(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in HOP}


@contextlib.contextmanager
def gate(host: str, port: int, files: Mapping[str, Path], upstream: str, say: Say) -> Iterator[None]:
    """Listen at `host` and `port` while the block runs, with TLS if there are `files`, by Flower's flags."""
    passing = Gate(upstream, files.get("--ssl-ca-certfile"), say)
    app = Starlette(routes=[Route("/{path:path}", passing.forward, methods=["POST"])])
    config = uvicorn.Config(
        app,
        host,
        port,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        limit_concurrency=MAX_REQUESTS,
        ssl_certfile=files.get("--ssl-certfile"),
        ssl_keyfile=files.get("--ssl-keyfile"),
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while thread.is_alive() and not server.started:
        time.sleep(0.05)
    if not server.started:
        raise UserError(
            f"--port {port}: another program has taken {host}:{port} in the meantime; choose another --port"
        )
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(5)
