"""`python data.py …`: look at a data set, prepare one where there is a network, carry it to where there is none."""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

import utils
from elastic_trainer.cli.commands import parse_data
from elastic_trainer.datasets.image_folder import image_folder
from elastic_trainer.datasets.names import TFDS_NAMES
from elastic_trainer.datasets.show import show
from elastic_trainer.datasets.tfds import prepare_tfds, tfds_builder
from utils import UserError

SUMS = "SHA256SUMS"  # the last file of an archive, in the form that sha256sum -c reads
_BLOCK = 1 << 20


def main() -> None:
    args = parse_data()
    {"show": show, "prepare": prepare, "pack": pack, "unpack": unpack}[args.command](args)


def prepare(args: argparse.Namespace) -> None:
    """Download a data set by TFDS, unless it is there, and write it in TFDS' own form."""
    builder = prepare_tfds(args.dataset_name, args.data_dir)
    splits = ", ".join(f"{split.num_examples} {name}" for name, split in builder.info.splits.items())
    print(f"{args.dataset_name} is ready in {builder.data_dir}: {splits}")
    print(f"to carry it elsewhere: {_command('pack', args.dataset_name, args.data_dir)}")


def _command(command: str, name: str, data_dir: Path | None) -> str:
    where = [] if data_dir is None else ["--data_dir", str(data_dir)]
    return shlex.join(["python", "data.py", command, "--dataset_name", name, *where])


def pack(args: argparse.Namespace) -> None:
    """Put a data set, with a checksum of each file, into one tar archive."""
    if args.dataset_name in TFDS_NAMES:
        builder = tfds_builder(args.dataset_name, args.data_dir)
        folder = Path(builder.data_dir)
        if not folder.is_dir():
            prepare_first = _command("prepare", args.dataset_name, args.data_dir)
            raise UserError(f"--dataset_name {args.dataset_name}: not prepared in {folder}; first {prepare_first}")
        root, name = folder.parents[1], args.dataset_name
    else:
        folder = image_folder(args.data_dir).resolve()
        root, name = folder.parent, folder.name
    output = args.output or Path(f"{name}.tar")
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    if output.resolve().is_relative_to(folder):
        raise UserError(f"--output {output}: lies in {folder}, which is to be packed; choose another place")
    sums = []
    with (
        utils.atomic_path(output) as temporary,
        tarfile.open(temporary, "w") as archive,
        tqdm(total=sum(path.stat().st_size for path in files), desc="packing", unit="B", unit_scale=True) as bar,
    ):
        for path in files:
            member = path.relative_to(root).as_posix()
            archive.add(path, member, recursive=False)
            sums.append(f"{_checksum(path)}  {member}\n")
            bar.update(path.stat().st_size)
        listing = temporary.with_suffix(".sums")
        try:
            listing.write_text("".join(sums), encoding="utf-8", errors="surrogateescape")
            archive.add(listing, SUMS)
        finally:
            listing.unlink(missing_ok=True)
    print(f"{output}: {len(files)} files, {output.stat().st_size / 1e6:,.0f} MB")
    print(f"on the other machine: {shlex.join(['python', 'data.py', 'unpack', output.name, '--data_dir', 'DIR'])}")


def _checksum(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            found.update(block)
    return found.hexdigest()


def unpack(args: argparse.Namespace) -> None:
    """Take a data set out of an archive of `pack`, whole or not at all."""
    place = args.data_dir
    with utils.writing(place):
        place.mkdir(parents=True, exist_ok=True)
    unpacked = place / f".{os.getpid()}.unpacking"
    try:
        with (
            utils.writing(place),
            _undamaged(args.archive),
            tarfile.open(args.archive) as archive,
            tqdm(total=args.archive.stat().st_size, desc="unpacking", unit="B", unit_scale=True) as bar,
        ):
            for member in archive:
                top = place / member.name.split("/")[0]
                if top.is_dir() and top.name not in (".", ".."):
                    raise UserError(f"--data_dir {place}: {top} is there already; remove it or name another folder")
                _extract(archive, member, unpacked)
                bar.update(member.size)
        _check(args.archive, unpacked)
        [top] = unpacked.iterdir()
        with utils.writing(place):
            top.replace(place / top.name)
    finally:
        shutil.rmtree(unpacked, ignore_errors=True)
    is_tfds = top.name in TFDS_NAMES
    flags = ["--dataset_name", top.name if is_tfds else "image_folder"]
    flags += ["--data_dir", str(place if is_tfds else place / top.name)]
    print(f"unpacked and checked: {place / top.name}")
    print(f"to use it: {shlex.join(['python', 'main.py', *flags])}")


@contextmanager
def _undamaged(path: Path) -> Iterator[None]:
    """What makes this block fail to read the archive `path` becomes a `UserError`."""
    try:
        yield
    except tarfile.TarError as error:
        raise UserError(
            f"{path}: is no tar archive, or damaged, or cut off ({utils.first_line(error)}); copy it anew"
        ) from error


def _extract(archive: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    """Write a plain file of the archive below `folder`; anything else has no business in it."""
    target = folder / member.name
    source = archive.extractfile(member) if member.isreg() else None
    if source is None or ".." in target.parts or member.name.startswith("/"):
        raise UserError(f"{archive.name!s}: holds '{member.name}', which no data set has; it is not from data.py pack")
    target.parent.mkdir(parents=True, exist_ok=True)
    with source, target.open("wb") as file:
        shutil.copyfileobj(source, file, _BLOCK)


def _check(archive: Path, folder: Path) -> None:
    """Hold what was unpacked against its checksums."""
    listing = folder / SUMS
    if not listing.is_file():
        raise UserError(f"{archive}: ends without its checksums, so it was cut off; copy it anew")
    lines = listing.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    listing.unlink()
    for line in lines:
        checksum, _, name = line.partition("  ")
        if not (folder / name).is_file() or _checksum(folder / name) != checksum:
            raise UserError(f"{archive}: {name} in it is not what was packed; copy it anew")
