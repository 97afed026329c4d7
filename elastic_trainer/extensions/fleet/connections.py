"""What the connections of a server and of a board need, checked before anything starts (no Flower here)."""

from __future__ import annotations

import importlib.util
import socket
import ssl
from pathlib import Path

from elastic_trainer.errors import UserError
from elastic_trainer.extensions.fleet.settings import BoardSettings, FleetSettings

HERE = ("127.0.0.1", "localhost", "::1")


def check_flower() -> None:
    """Raise `UserError` if Flower is not installed."""
    if importlib.util.find_spec("flwr") is None:
        raise UserError(
            "fleet.py: Flower is not installed here; ./scripts/run_fleet.sh makes its environment, then use "
            ".venv-fleet/bin/python fleet.py"
        )


def listen(host: str, port: int) -> socket.socket:
    """A socket there. Raises `UserError` if another program has it."""
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
        found.listen(128)
    except OSError as error:
        found.close()
        raise UserError(
            f"--port {port}: cannot listen at {host}:{port} ({error.strerror}); does another server of a fleet run "
            "there? Stop it, or choose another --port"
        ) from error
    return found


def tls_files(settings: FleetSettings) -> dict[str, Path]:
    """The files in --certificates, by uvicorn's options. Raises `UserError` if one is missing, or TLS is needed."""
    folder = settings.certificates
    if settings.host not in HERE and (folder is None or settings.node_keys is None):
        raise UserError(
            f"--host {settings.host}: other machines can reach it, so --certificates and --node_keys are needed "
            "(docs/fleet.md)"
        )
    if folder is None:
        if settings.node_keys is not None:
            raise UserError("--node_keys: needs --certificates; leave it out, or give both")
        return {}
    files = {"ssl_certfile": folder / "server.pem", "ssl_keyfile": folder / "server.key"}
    for path in files.values():
        if not path.is_file():
            raise UserError(f"--certificates {folder}: there is no {path.name}; docs/fleet.md shows how to make it")
    return files


def public_keys(settings: FleetSettings) -> list[Path]:
    """The files in --node_keys. Raises `UserError` if there are none."""
    if settings.node_keys is None:
        return []
    found = sorted(settings.node_keys.glob("*.pub"))
    if not found:
        raise UserError(f"--node_keys {settings.node_keys}: has no files *.pub; docs/fleet.md shows how to make them")
    return found


def check_server(settings: FleetSettings) -> None:
    """Raise now the `UserError` that `superlink` would raise for settings that do not fit, or a port in use."""
    tls_files(settings)
    public_keys(settings)
    listen(settings.host, settings.port).close()


def check_board(settings: BoardSettings) -> None:
    """Raise `UserError` for settings of a board that do not fit together, or files that are missing."""
    host, colon, port = settings.superlink.rpartition(":")
    if not colon or not port.isdigit():
        raise UserError(f"--superlink {settings.superlink}: must be HOST:PORT, such as 192.168.1.10:9092")
    for name in ("root_certificates", "private_key"):
        path = getattr(settings, name)
        if path is not None and not path.is_file():
            raise UserError(f"--{name} {path}: there is no such file")
    if settings.root_certificates is not None:
        try:
            ssl.create_default_context(cadata=settings.root_certificates.read_text("ascii"))
        except (ssl.SSLError, ValueError) as error:
            why = "is no certificate; copy the server's ca.crt again"
            raise UserError(f"--root_certificates {settings.root_certificates}: {why}") from error
    elif host.strip("[]") not in HERE:
        raise UserError(
            f"--superlink {settings.superlink}: is another machine, so --root_certificates is needed: the server's "
            "ca.crt (docs/fleet.md)"
        )
    if settings.private_key is not None and settings.root_certificates is None:
        raise UserError("--private_key: needs --root_certificates; leave it out, or give both")
