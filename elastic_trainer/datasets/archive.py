"""`python data.py prepare|pack|unpack`: takes a data set to a machine that has no network.

`prepare` downloads a data set of tensorflow-datasets, `pack` writes it (or a folder of photos) to one tar file with a
checksum of each file, and `unpack` checks the file and extracts it.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

import utils
from elastic_trainer.datasets.image_folder import image_folder
from elastic_trainer.datasets.names import TFDS_NAMES
from elastic_trainer.datasets.tfds import prepare_tfds, tfds_builder
from utils import UserError

CHECKSUMS = "SHA256SUMS"  # the last file of an archive, in the format that sha256sum -c reads
_BLOCK = 1 << 20


def prepare(name: str, data_dir: Path | None) -> None:
    """Download a data set of tensorflow-datasets and write it in TFDS' format, unless that is done already.

    Raises:
        UserError: see `tfds.prepare_tfds`.
    """
    builder = prepare_tfds(name, data_dir)
    splits = ", ".join(f"{split.num_examples} {split_name}" for split_name, split in builder.info.splits.items())
    print(f"{name} is ready in {builder.data_dir}: {splits}")
    print(f"to take it to another machine: {_command('pack', name, data_dir)}")


def _command(command: str, name: str, data_dir: Path | None) -> str:
    flags = [] if data_dir is None else ["--data_dir", str(data_dir)]
    return shlex.join(["python", "data.py", command, "--dataset_name", name, *flags])


def pack(name: str, data_dir: Path | None, output: Path | None) -> None:
    """Write a data set to one tar file, with a checksum of each file.

    Args:
        name: image_folder, or a data set of tensorflow-datasets that is prepared.
        data_dir: folder of the photos, or of TFDS.
        output: the tar file; None: <name>.tar in the current folder.

    Raises:
        UserError: there is no such data set, or the tar file cannot be written.
    """
    if name in TFDS_NAMES:
        folder = Path(tfds_builder(name, data_dir).data_dir)
        if not folder.is_dir():
            first = _command("prepare", name, data_dir)
            raise UserError(f"--dataset_name {name}: not prepared in {folder}; first run {first}")
        root, stem = folder.parents[1], name
    else:
        folder = image_folder(data_dir).resolve()
        root, stem = folder.parent, folder.name
    output = output or Path(f"{stem}.tar")
    if output.resolve().is_relative_to(folder):
        raise UserError(f"--output {output}: lies inside {folder}, the folder to pack; choose another place")
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    _write_archive(files, root, output)
    print(f"{output}: {len(files)} files, {output.stat().st_size / 1e6:,.0f} MB")
    print(f"on the other machine: {shlex.join(['python', 'data.py', 'unpack', output.name, '--data_dir', 'DIR'])}")


def _write_archive(files: Sequence[Path], root: Path, output: Path) -> None:
    """Write `files` and their checksums to `output`, under names relative to `root`."""
    checksums = []
    with (
        utils.atomic_path(output) as temporary,
        tarfile.open(temporary, "w") as archive,
        tqdm(total=sum(path.stat().st_size for path in files), desc="packing", unit="B", unit_scale=True) as bar,
    ):
        for path in files:
            member = path.relative_to(root).as_posix()
            archive.add(path, member, recursive=False)
            checksums.append(f"{_checksum(path)}  {member}\n")
            bar.update(path.stat().st_size)
        listing = temporary.with_suffix(".sums")
        try:
            listing.write_text("".join(checksums), encoding="utf-8", errors="surrogateescape")
            archive.add(listing, CHECKSUMS)
        finally:
            listing.unlink(missing_ok=True)


def _checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def unpack(path: Path, data_dir: Path) -> None:
    """Extract a data set from a tar file that `pack` has written: completely or not at all.

    Args:
        path: the tar file.
        data_dir: the data set becomes a folder in it.

    Raises:
        UserError: the tar file is damaged or was not written by `pack`, or `data_dir` has such a folder already.
    """
    with utils.writing(data_dir):
        data_dir.mkdir(parents=True, exist_ok=True)
    unpacked = data_dir / f".{os.getpid()}.unpacking"
    try:
        with (
            utils.writing(data_dir),
            _reading_archive(path),
            tarfile.open(path) as archive,
            tqdm(total=path.stat().st_size, desc="unpacking", unit="B", unit_scale=True) as bar,
        ):
            for member in archive:
                top = data_dir / member.name.split("/")[0]
                if top.is_dir() and top.name not in (".", ".."):
                    raise UserError(f"--data_dir {data_dir}: {top} exists already; remove it or name another folder")
                _extract(archive, member, unpacked)
                bar.update(member.size)
        _check(path, unpacked)
        [top] = unpacked.iterdir()
        with utils.writing(data_dir):
            top.replace(data_dir / top.name)
    finally:
        shutil.rmtree(unpacked, ignore_errors=True)
    is_tfds = top.name in TFDS_NAMES
    flags = ["--dataset_name", top.name if is_tfds else "image_folder"]
    flags += ["--data_dir", str(data_dir if is_tfds else data_dir / top.name)]
    print(f"unpacked and checked: {data_dir / top.name}")
    print(f"to use it: {shlex.join(['python', 'main.py', *flags])}")


@contextmanager
def _reading_archive(path: Path) -> Iterator[None]:
    """Turn a `TarError` in this block into a `UserError` that names the archive `path`."""
    try:
        yield
    except tarfile.TarError as error:
        raise UserError(
            f"{path}: is not a tar archive, or damaged or incomplete ({utils.first_line(error)}); copy it again"
        ) from error


def _extract(archive: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    """Write a regular file of the archive below `folder`. Raises `UserError` for any other member or path."""
    target = folder / member.name
    source = archive.extractfile(member) if member.isreg() else None
    if source is None or ".." in target.parts or member.name.startswith("/"):
        raise UserError(
            f"{archive.name!s}: contains '{member.name}', which no data set has; it is not from data.py pack"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with source, target.open("wb") as file:
        shutil.copyfileobj(source, file, _BLOCK)


def _check(archive: Path, folder: Path) -> None:
    """Compare the extracted files in `folder` with their checksums. Raises `UserError` if they differ."""
    listing = folder / CHECKSUMS
    if not listing.is_file():
        raise UserError(f"{archive}: has no checksums at its end, so it is incomplete; copy it again")
    lines = listing.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    listing.unlink()
    for line in lines:
        checksum, _, name = line.partition("  ")
        if not (folder / name).is_file() or _checksum(folder / name) != checksum:
            raise UserError(f"{archive}: {name} in it does not match its checksum; copy it again")
