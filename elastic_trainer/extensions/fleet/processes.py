"""Flower's processes: the SuperLink of a server and the SuperNode of a board, and the app that both run.

Nothing is sent to anybody else: telemetry and the search for updates are off, and no app's requirements are installed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from elastic_trainer.errors import UserError
from elastic_trainer.extensions.fleet.link import FlowerLink, Socket, answer
from elastic_trainer.extensions.fleet.messages import Parcel
from elastic_trainer.extensions.fleet.settings import BoardSettings, FleetSettings
from elastic_trainer.files import write_text, writing

ROOT, APP = Path(__file__).resolve().parents[3], Path(__file__).resolve().with_name("app")
START_SECONDS = 120  # in which SuperLink and ServerApp have started, on a slow board too
HERE = ("127.0.0.1", "localhost", "::1")
SHORT_SECONDS, MAX_STARTS = 10.0, 5  # a SuperNode that ends so soon, and so often, will not run
GOODBYE_SECONDS = 3.0  # in which Flower passes on a board's last answer
LINK_LOG, NODE_LOG = "superlink.log", "supernode.log"
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


@contextlib.contextmanager
def _home(messengers: Socket) -> Iterator[tuple[Path, dict[str, str]]]:
    """A folder for Flower's own files while the block runs, and the environment of its processes."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with contextlib.closing(messengers), tempfile.TemporaryDirectory(prefix="elastic-fleet-") as folder:
        yield (
            Path(folder),
            {
                **os.environ,
                **messengers.environment,
                "FLWR_HOME": folder,
                "FLWR_TELEMETRY_ENABLED": "0",
                "FLWR_DISABLE_UPDATE_CHECK": "1",
                "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",  # seconds; by default a message waits for up to 1 s longer
                "PYTHONPATH": os.pathsep.join(paths),
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
    lines = [line for line in log.read_text(errors="replace").splitlines() if "rror" in line or "ERROR" in line]
    text = lines[-1] if lines else "no reason is given"
    return " ".join(part for part in text.replace("\x1b", " ").split() if not part.startswith("["))


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
    if folder is None:
        if settings.host not in HERE:
            raise UserError(
                f"--host {settings.host}: other machines can reach it, so --certificates is needed (docs/fleet.md)"
            )
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


def _flwr(words: Sequence[str], environment: Mapping[str, str], what: str) -> None:
    """Run Flower's command line. Raises `UserError` that starts with `what` if it fails."""
    try:
        done = subprocess.run(
            ["flwr", *words], env=environment, check=False, capture_output=True, text=True, timeout=START_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"{what}: no answer within {START_SECONDS:.0f} s") from None
    if done.returncode:
        reason = " ".join(part for part in f"{done.stdout} {done.stderr}".split() if part.isascii())
        raise UserError(f"{what}: {reason[-300:]}")


def check_server(settings: FleetSettings) -> None:
    """Raise now the `UserError` that `superlink` would raise for settings that do not fit, or a port in use."""
    _tls_files(settings)
    _public_keys(settings)
    _check_port(settings.host, settings.port)


@contextlib.contextmanager
def superlink(settings: FleetSettings, folder: Path, check: Callable[[], object]) -> Iterator[FlowerLink]:
    """A SuperLink with our ServerApp, while the block runs, and the link to the boards.

    Args:
        settings: where it listens.
        folder: of the run; Flower's log is written there.
        check: is called while waiting; may raise an error to stop.

    Raises:
        UserError: it does not start.
    """
    log, files = folder / LINK_LOG, _tls_files(settings)
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::", *HERE) else settings.host
    safety = f'root-certificates = "{files["--ssl-ca-certfile"]}"' if files else "insecure = true"
    connection = f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "{host}:{settings.port}"\n{safety}\n'
    words = ["flower-superlink", "--host", settings.host, "--port", str(settings.port)]
    words += ["--disable-runtime-dependency-installation"]  # which would ask a package index
    words += [word for flag, path in files.items() for word in (flag, str(path))] if files else ["--insecure"]
    words += ["--enable-supernode-auth"] if settings.node_keys else []
    messengers = Socket()
    with _home(messengers) as (home, environment), _process(words, log, environment) as process:
        write_text(home / "config.toml", connection)
        _wait_until(lambda: _listens(host, settings.port), process, log, check)
        for key in _public_keys(settings):
            _flwr(["supernode", "register", str(key), "here"], environment, f"--node_keys: {key.name} cannot be used")
        _flwr(["run", str(APP), "here"], environment, "Flower does not start the fleet's app")
        found: list[FlowerLink] = []
        threading.Thread(target=lambda: found.append(FlowerLink(messengers.accept())), daemon=True).start()
        _wait_until(lambda: bool(found), process, log, check)
        try:
            yield found[0]
        finally:
            found[0].close()


def _listens(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1):
        return True
    return False


def _wait_until(
    is_done: Callable[[], bool], process: subprocess.Popen[bytes], log: Path, check: Callable[[], object]
) -> None:
    """Wait until `is_done()`. Raises `UserError` if the process ends before, or it takes too long."""
    end = time.monotonic() + START_SECONDS
    while not is_done():
        check()
        if process.poll() is not None or time.monotonic() > end:
            raise UserError(f"Flower does not start ({_last_error(log)}); all its messages are in {log}")
        time.sleep(0.1)


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


@contextlib.contextmanager
def _supernode(settings: BoardSettings, folder: Path) -> Iterator[Socket]:
    """A SuperNode while the block runs, and the socket to which its messengers bring messages.

    Where it ends by itself, a message of the kind "down" comes, whose value "why" is its last error.
    """
    messengers, log = Socket(), folder / NODE_LOG
    words = ["flower-supernode", "--superlink", settings.superlink, "--port", str(free_port())]
    certificates, key = settings.root_certificates, settings.private_key
    words += ["--root-certificates", str(certificates.absolute())] if certificates else ["--insecure"]
    words += ["--auth-supernode-private-key", str(key.absolute())] if key else []
    with _home(messengers) as (_, environment), _process(words, log, environment) as process:
        has_ended = threading.Event()

        def watch() -> None:
            process.wait()
            if not has_ended.is_set():
                with contextlib.suppress(OSError):
                    messengers.tell("down", _last_error(log))

        threading.Thread(target=watch, daemon=True).start()
        try:
            yield messengers
        finally:
            has_ended.set()


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
        UserError: it ends as soon as it has started, `MAX_STARTS` times.
    """
    short = 0
    while True:
        start = time.monotonic()
        with _supernode(settings, folder) as messengers:
            while (message := answer(messengers, handle)).kind != "down":
                if message.kind == "end":
                    time.sleep(GOODBYE_SECONDS)
                    return message
                if message.kind == "train":
                    afterwards()
        short = short + 1 if time.monotonic() - start < SHORT_SECONDS else 0
        why = f"Flower's SuperNode has ended ({message.values['why']})"
        if short == MAX_STARTS:
            raise UserError(f"--superlink {settings.superlink}: {why}; all its messages are in {folder / NODE_LOG}")
        say(f"{why}; it starts again")
        time.sleep(1 + 2 * short)  # a SuperLink that has just started knows no keys yet
