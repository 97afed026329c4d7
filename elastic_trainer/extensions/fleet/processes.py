"""Flower's processes: the SuperLink of a server, and the SuperNode of a board.

Both listen on this machine only; boards reach the SuperLink through the `gate`. Both leave their tasks to whoever has
the secret that they were started with (`runtime`). Nothing is sent to anybody else: telemetry and the search for
updates are off, and no app's requirements are installed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import secrets
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from elastic_trainer.errors import UserError
from elastic_trainer.extensions.fleet.messages import Parcel
from elastic_trainer.extensions.fleet.settings import BoardSettings, FleetSettings
from elastic_trainer.files import writing

if TYPE_CHECKING:
    from elastic_trainer.extensions.fleet.flower_app import FlowerLink
    from elastic_trainer.extensions.fleet.runtime import Runtime

APP = Path(__file__).resolve().with_name("app")
START_SECONDS = 120  # in which SuperLink and ServerApp have started, on a slow board too
HERE = ("127.0.0.1", "localhost", "::1")
CONNECT_SECONDS = 10.0
NO_KEY = 2001, 2004  # Flower's codes where the server wants a key, or does not know it
SHORT_SECONDS, MAX_PAUSE = 10.0, 60.0  # after a SuperNode that ends sooner, the next one starts later each time
GOODBYE_SECONDS = 3.0  # in which Flower passes on a board's last answer
HOME = "elastic-fleet-"  # of the folders with Flower's files, with the number of the process
LINK_LOG, NODE_LOG = "superlink.log", "supernode.log"
TASKS = ("--isolation", "process", "--superexec-auth-secret-file")
# Runs a command that ends when this process does, so that a killed `fleet.py` leaves none behind (1: PR_SET_PDEATHSIG).
_WITH_PARENT = """import ctypes, os, sys
if sys.platform.startswith("linux"):
    ctypes.CDLL(None).prctl(1, 15)
os.execvp(sys.argv[1], sys.argv[1:])
"""


def check_flower() -> None:
    """Raise `UserError` if Flower is not installed."""
    if importlib.util.find_spec("flwr") is None:
        raise UserError(
            "fleet.py: Flower is not installed here; ./scripts/run_fleet.sh makes its environment, then use "
            ".venv-fleet/bin/python fleet.py"
        )


def _is_running(number: str) -> bool:
    """Whether there is a process of this number, which may be somebody else's."""
    try:
        os.kill(int(number), 0)
    except (ValueError, ProcessLookupError):
        return False
    except OSError:
        pass
    return True


@contextlib.contextmanager
def _home() -> Iterator[tuple[Path, dict[str, str]]]:
    """A file with a new secret, which nobody else can read, and the environment of one of Flower's processes."""
    for left in Path(tempfile.gettempdir()).glob(f"{HOME}*-*"):
        if not _is_running(left.name.removeprefix(HOME).partition("-")[0]):
            shutil.rmtree(left, ignore_errors=True)  # of a process that was killed
    with tempfile.TemporaryDirectory(prefix=f"{HOME}{os.getpid()}-") as folder:
        secret = Path(folder) / "secret"
        secret.write_bytes(secrets.token_bytes(32))
        yield (
            secret,
            {
                **os.environ,
                "FLWR_HOME": folder,
                "FLWR_TELEMETRY_ENABLED": "0",
                "FLWR_DISABLE_UPDATE_CHECK": "1",
                "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
            },
        )


@contextlib.contextmanager
def _process(words: Sequence[str], log: Path, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """One of Flower's programs while the block runs; what it prints is appended to `log`."""
    with writing(log):
        log.parent.mkdir(parents=True, exist_ok=True)
        file = log.open("ab")
    with file:
        process = subprocess.Popen(
            [sys.executable, "-c", _WITH_PARENT, *words],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _last_error(log: Path) -> str:
    """The last line in a log that tells of an error, without its colours."""
    marks = "rror", "ERROR", "[code: "
    lines = [line for line in log.read_text(errors="replace").splitlines() if any(mark in line for mark in marks)]
    text = lines[-1] if lines else "no reason is given"
    return re.sub(r"\x1b\[\d+m", "", text).strip()


def _check_port(host: str, port: int) -> None:
    """Raise `UserError` if another program listens there."""
    with contextlib.closing(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((host, port))
        except OSError as error:
            raise UserError(
                f"--port {port}: cannot listen at {host}:{port} ({error.strerror}); does another server of a fleet run "
                "there? Stop it, or choose another --port"
            ) from error


def free_port() -> int:
    """A port of this machine on which nothing listens."""
    with contextlib.closing(socket.socket()) as one:
        one.bind(("127.0.0.1", 0))
        number: int = one.getsockname()[1]
        return number


def _tls_files(settings: FleetSettings) -> dict[str, Path]:
    """The files in --certificates by Flower's flags. Raises `UserError` if one is missing, or TLS is needed."""
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
    names = {"--ssl-ca-certfile": "ca.crt", "--ssl-certfile": "server.pem", "--ssl-keyfile": "server.key"}
    files = {flag: (folder / name).absolute() for flag, name in names.items()}
    for path in files.values():
        if not path.is_file():
            raise UserError(f"--certificates {folder}: there is no {path.name}; docs/fleet.md shows how to make it")
    return files


def _public_keys(settings: FleetSettings) -> list[Path]:
    """The files in --node_keys. Raises `UserError` if there are none."""
    if settings.node_keys is None:
        return []
    found = sorted(path.absolute() for path in settings.node_keys.glob("*.pub"))
    if not found:
        raise UserError(f"--node_keys {settings.node_keys}: has no files *.pub; docs/fleet.md shows how to make them")
    return found


def check_server(settings: FleetSettings) -> None:
    """Raise now the `UserError` that `superlink` would raise for settings that do not fit, or a port in use."""
    _tls_files(settings)
    _public_keys(settings)
    _check_port(settings.host, settings.port)


@contextlib.contextmanager
def superlink(
    settings: FleetSettings, folder: Path, check: Callable[[], object], say: Callable[[str], object] = print
) -> Iterator[FlowerLink]:
    """A SuperLink whose ServerApp is this process, while the block runs, and the link to the boards.

    Args:
        settings: where boards reach it.
        folder: of the run; Flower's log is written there.
        check: is called while waiting; may raise an error to stop.
        say: is given a line on each stranger.

    Raises:
        UserError: it does not start.
    """
    from flwr.supercore.constant import TaskType

    from elastic_trainer.extensions.fleet.gate import gate
    from elastic_trainer.extensions.fleet.runtime import Runtime, server_link, start_app

    log, files, port = folder / LINK_LOG, _tls_files(settings), free_port()
    words = ["flower-superlink", "--host", "127.0.0.1", "--port", str(port)]
    words += [word for flag, path in files.items() for word in (flag, str(path))] if files else ["--insecure"]
    words += ["--enable-supernode-auth"] if settings.node_keys else []
    words += ["--disable-runtime-dependency-installation"]  # which would ask a package index
    with contextlib.ExitStack() as stack:
        secret, environment = stack.enter_context(_home())
        process = stack.enter_context(_process([*words, *TASKS, str(secret)], log, environment))
        _wait_for(port, process, log, check)
        runtime = Runtime(f"127.0.0.1:{port}", secret.read_bytes(), process, files.get("--ssl-ca-certfile"))
        start_app(runtime, APP, _public_keys(settings))
        token = next(runtime.tokens(TaskType.SERVER_APP, check), None)
        if token is None:
            raise _no_start(log)
        link = stack.enter_context(server_link(runtime, token))
        upstream = f"http{'s' if files else ''}://{runtime.address}"
        stack.enter_context(gate(settings.host, settings.port, files, upstream, say))
        yield link


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path, check: Callable[[], object]) -> None:
    """Wait until the process listens. Raises `UserError` if it ends before, or takes too long."""
    end = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < end:
        check()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    raise _no_start(log)


def _no_start(log: Path) -> UserError:
    return UserError(f"Flower does not start ({_last_error(log)}); all its messages are in {log}")


def check_board(settings: BoardSettings) -> None:
    """Raise `UserError` for settings of a board that do not fit together, or files that are missing."""
    host, colon, port = settings.superlink.rpartition(":")
    if not colon or not port.isdigit():
        raise UserError(f"--superlink {settings.superlink}: must be HOST:PORT, such as 192.168.1.10:9092")
    for name in ("root_certificates", "private_key"):
        path = getattr(settings, name)
        if path is not None and not path.is_file():
            raise UserError(f"--{name} {path}: there is no such file")
    if settings.root_certificates is None and host.strip("[]") not in HERE:
        raise UserError(
            f"--superlink {settings.superlink}: is another machine, so --root_certificates is needed: the server's "
            "ca.crt (docs/fleet.md)"
        )
    if settings.private_key is not None and settings.root_certificates is None:
        raise UserError("--private_key: needs --root_certificates; leave it out, or give both")


def _answers(settings: BoardSettings) -> bool:
    """Whether the server can be reached.

    Raises:
        UserError: it shows another certificate than the board expects. Flower would try for ever, and not say why.
    """
    host, _, port = settings.superlink.rpartition(":")
    host, authority = host.strip("[]"), settings.root_certificates
    try:
        with socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS) as connection:
            if authority is not None:
                with ssl.create_default_context(cafile=authority).wrap_socket(connection, server_hostname=host):
                    return True
            connection.sendall(b"HEAD / HTTP/1.1\r\nHost: fleet\r\nConnection: close\r\n\r\n")
            if not connection.recv(5).startswith(b"HTTP"):
                raise UserError(
                    f"--superlink {settings.superlink}: the server uses TLS; --root_certificates must name its ca.crt"
                )
            return True
    except ssl.SSLCertVerificationError as error:
        raise UserError(
            f"--root_certificates {authority}: does not vouch for the server at {settings.superlink} "
            f"({error.verify_message}); copy the server's ca.crt again"
        ) from error
    except ssl.SSLError as error:
        raise UserError(
            f"--root_certificates {authority}: cannot be used with the server at {settings.superlink} "
            f"({error.reason or error}); a server without --certificates needs none"
        ) from error
    except OSError:
        return False


@contextlib.contextmanager
def _supernode(settings: BoardSettings, folder: Path) -> Iterator[Runtime]:
    """A SuperNode while the block runs."""
    from elastic_trainer.extensions.fleet.runtime import Runtime

    port, log = free_port(), folder / NODE_LOG
    words = ["flower-supernode", "--superlink", settings.superlink, "--host", "127.0.0.1", "--port", str(port)]
    certificates, key = settings.root_certificates, settings.private_key
    words += ["--root-certificates", str(certificates.absolute())] if certificates else ["--insecure"]
    words += ["--auth-supernode-private-key", str(key.absolute())] if key else []
    with _home() as (secret, environment), _process([*words, *TASKS, str(secret)], log, environment) as process:
        yield Runtime(f"127.0.0.1:{port}", secret.read_bytes(), process)


def take_part(
    settings: BoardSettings,
    folder: Path,
    handle: Callable[[Parcel], Parcel],
    say: Callable[[str], object],
    afterwards: Callable[[], object] = lambda: None,
) -> Parcel:
    """Answer what a server asks by `handle`, until it sends a message of the kind "end", which is returned.

    `afterwards` is called after each answer to "train".

    A SuperNode ends when a SuperLink that has started again does not know it. It is started again then.

    Raises:
        UserError: the server has other certificates, or does not take this board's key.
    """
    from elastic_trainer.extensions.fleet.runtime import parcels

    short, log = 0, folder / NODE_LOG
    while True:
        if not _answers(settings):
            say(f"waiting for the server at {settings.superlink}")
            while not _answers(settings):
                time.sleep(1)
        start = time.monotonic()
        with _supernode(settings, folder) as runtime:
            for message in parcels(runtime, handle):
                if message.kind == "end":
                    time.sleep(GOODBYE_SECONDS)
                    return message
                if message.kind == "train":
                    afterwards()
        short = short + 1 if time.monotonic() - start < SHORT_SECONDS else 0
        why = _last_error(log)
        if any(f"[code: {code}]" in why for code in NO_KEY):
            key = "none" if settings.private_key is None else settings.private_key
            raise UserError(
                f"--private_key {key}: the server does not know this key; the server's --node_keys must have its .pub "
                "file when it starts (docs/fleet.md)"
            )
        say(f"Flower's SuperNode has ended ({why}; all its messages are in {log}); it starts again")
        time.sleep(min(2**short, MAX_PAUSE))
