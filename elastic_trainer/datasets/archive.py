"""`python data.py prepare|pack|unpack`: takes a data set to a machine that has no network.

`prepare` downloads a data set of tensorflow-datasets, `pack` writes it (or a folder of photos) to one tar file with a
checksum of each file, and `unpack` checks the file and extracts it.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shlex
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from tqdm import tqdm

from elastic_trainer.datasets.layout import image_folder, reading
from elastic_trainer.datasets.tfds import prepare_tfds, tfds_builder
from elastic_trainer.errors import UserError, first_line, printable
from elastic_trainer.files import atomic_large_path, locked, remove_leftovers, writing
from elastic_trainer.registry import DATASETS

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
    if DATASETS[name].is_tfds:
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
    if folder.name in ("", CHECKSUMS):
        raise UserError(f"--data_dir {folder}: an archive cannot hold a folder of this name; rename it")
    entries = [*_entries(folder)]
    count = sum(path.is_file() for path in entries)
    if not count:
        raise UserError(f"--data_dir {folder}: contains no files to pack")
    _write_archive(entries, root, output)
    print(printable(f"{output}: {count} files, {output.stat().st_size / 1e6:,.0f} MB"))
    unpacking = shlex.join(["python", "data.py", "unpack", output.name, "--data_dir", "DIR"])
    print(printable(f"on the other machine: {unpacking}"))


def _entries(folder: Path, inside: tuple[Path, ...] = ()) -> Iterator[Path]:
    """All files below `folder`, and its folders that are empty. Links are followed.

    Args:
        folder: to list.
        inside: the folders that it lies in, without links.

    Raises:
        UserError: a folder cannot be read or is a link to one that it lies in, or an entry is no file or folder.
    """
    with reading(folder):
        resolved, paths = folder.resolve(), sorted(folder.iterdir())
    if resolved in inside:
        raise UserError(f"--data_dir {folder}: is a link to a folder that it lies in; remove it")
    if not paths:
        yield folder
    for path in paths:
        with reading(path):
            is_folder, is_file = path.is_dir(), path.is_file()
        if is_folder:
            yield from _entries(path, (*inside, resolved))
        elif is_file:
            yield path
        else:
            what = "is a link that leads to no file" if path.is_symlink() else "is neither a file nor a folder"
            raise UserError(f"--data_dir {path}: {what}; remove it")


def _write_archive(entries: Sequence[Path], root: Path, output: Path) -> None:
    """Write `entries` and the checksums of the files among them to `output`, under names relative to `root`."""
    listing = bytearray()
    remove_leftovers(output.parent, f".{output.name}")
    with (
        atomic_large_path(output) as temporary,
        tarfile.open(temporary, "w", dereference=True) as archive,  # links become the files that they lead to
        tqdm(total=sum(path.stat().st_size for path in entries), desc="packing", unit="B", unit_scale=True) as bar,
    ):
        for path in entries:
            member = path.relative_to(root).as_posix()
            if path.is_file():
                with reading(path):
                    listing += _listed(_checksum(path), member)
            archive.add(path, member, recursive=False)
            bar.update(path.stat().st_size)
        last = tarfile.TarInfo(CHECKSUMS)
        last.size = len(listing)
        archive.addfile(last, io.BytesIO(listing))


_ESCAPES = {"\\": r"\\", "\n": r"\n", "\r": r"\r"}  # in names, as sha256sum writes them


def _listed(checksum: str, name: str) -> bytes:
    """The line of a file in `CHECKSUMS`; it starts with a backslash if the name is escaped."""
    if "\n" in name or "\r" in name:
        checksum, name = f"\\{checksum}", "".join(_ESCAPES.get(character, character) for character in name)
    return f"{checksum}  {name}\n".encode(errors="surrogateescape")


def _checksums(listing: bytes) -> Iterator[tuple[str, str]]:
    """The name and the checksum of each file in the content of `CHECKSUMS`."""
    unescaped = {escape: character for character, escape in _ESCAPES.items()}
    for line in listing.decode(errors="surrogateescape").split("\n")[:-1]:
        checksum, _, name = line.removeprefix("\\").partition("  ")
        if line.startswith("\\"):
            name = re.sub(r"\\.", lambda found: unescaped.get(found[0], found[0]), name)
        yield name, checksum


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
    with writing(data_dir):
        data_dir.mkdir(parents=True, exist_ok=True)
    remove_leftovers(data_dir, ".unpacking")
    with writing(data_dir):
        unpacked = Path(tempfile.mkdtemp(".unpacking", f".{os.getpid()}.", data_dir))
        try:
            with locked(unpacked):
                _extract_all(path, unpacked, data_dir)
                _check(path, unpacked)
                top = _only_folder(path, unpacked)
                top.replace(data_dir / top.name)
        finally:
            shutil.rmtree(unpacked, ignore_errors=True)
    is_tfds = top.name in DATASETS and DATASETS[top.name].is_tfds
    flags = ["--dataset_name", top.name if is_tfds else "image_folder"]
    flags += ["--data_dir", str(data_dir if is_tfds else data_dir / top.name)]
    print(printable(f"unpacked and checked: {data_dir / top.name}"))
    print(printable(f"to use it: {shlex.join(['python', 'main.py', *flags])}"))


def _extract_all(path: Path, folder: Path, data_dir: Path) -> None:
    """Write everything in the archive `path` to `folder`.

    Raises:
        UserError: the archive is damaged or not from `pack`, or `data_dir` has a folder of the data set's name.
    """
    with (
        _reading_archive(path),
        tarfile.open(path) as archive,
        tqdm(total=path.stat().st_size, desc="unpacking", unit="B", unit_scale=True) as bar,
    ):
        for member in archive:
            name = PurePosixPath(member.name)  # "./a" is "a"
            is_known = member.isdir() or (member.isreg() and name.parts)
            if not is_known or name.is_absolute() or ".." in name.parts or "\0" in member.name:
                raise UserError(f"{path}: contains '{name}', which no data set has; it is not from data.py pack")
            if len(name.parts) > 1 and os.path.lexists(data_dir / name.parts[0]):
                taken = data_dir / name.parts[0]
                raise UserError(f"--data_dir {data_dir}: {taken} exists already; remove it or name another folder")
            _extract(archive, member, folder / name)
            bar.update(member.size)


@contextmanager
def _reading_archive(path: Path) -> Iterator[None]:
    """Turn what the archive `path` raises in this block, if it is damaged, into a `UserError` that names it."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:  # tarfile and each compression have types of their own
        if isinstance(error, OSError) and error.errno is not None:  # from the system
            raise
        raise UserError(
            f"{path}: is not a tar archive, or damaged or incomplete ({first_line(error)}); copy it again"
        ) from error


def _extract(archive: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    """Write a file or folder of the archive to `target`."""
    if member.isdir():
        target.mkdir(parents=True, exist_ok=True)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    source = archive.extractfile(member)
    assert source is not None  # it is a regular file
    with source, target.open("wb") as file:
        shutil.copyfileobj(source, file, _BLOCK)


def _check(archive: Path, folder: Path) -> None:
    """Compare the extracted files in `folder` with their checksums. Raises `UserError` if they differ or lack one."""
    listing = folder / CHECKSUMS
    if not listing.is_file():
        raise UserError(f"{archive}: has no checksums at its end, so it is incomplete; copy it again")
    checksums = dict(_checksums(listing.read_bytes()))
    listing.unlink()
    files = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    unlisted = sorted({*files} - {*checksums})
    if unlisted:
        raise UserError(f"{archive}: has no checksum of {unlisted[0]} in it; copy it again")
    for name, checksum in checksums.items():
        if not (folder / name).is_file() or _checksum(folder / name) != checksum:
            raise UserError(f"{archive}: {name} in it does not match its checksum; copy it again")


def _only_folder(archive: Path, folder: Path) -> Path:
    """The one folder in `folder`: the extracted data set. Raises `UserError` if there is anything else, or nothing."""
    tops = sorted(folder.iterdir())
    if len(tops) == 1 and tops[0].is_dir():
        return tops[0]
    found = ", ".join(f"'{top.name}'" for top in tops[:3]) + (", …" if len(tops) > 3 else "")
    raise UserError(f"{archive}: contains {found or 'no files'} instead of one folder; it is not from data.py pack")
