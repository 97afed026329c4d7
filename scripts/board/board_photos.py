"""The photos that a board trains on, and their features in a file. Part of board_train.py; NumPy and Pillow alone.

Photos are found, decoded and split into those to train on and those to test on as `main.py` does it.
"""

import hashlib
import json
import os
import shutil
import sys
import tarfile
import time
import unicodedata
from functools import partial
from pathlib import Path

import numpy as np
from board_decoding import MAX_MB, read_photo
from board_device import HERE, START, fail, first_line, left, read_json, remove, show, write_json
from board_digests import digest, tested_digests
from board_memory import free_memory_mb
from board_network import Network

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp")
VALIDATION = ("val", "valid", "validation")


def read_member(archive, member):
    with archive.extractfile(member) as file:
        return file.read()


def parts_of(path, files):
    """What the photos are for, by the first folder of their names: train, choose, test; empty if they are classes."""
    tops = {parts[0] for parts in files if len(parts) == 3}
    chosen = [name for name in VALIDATION if name in tops]
    if "train" not in tops:
        return {}
    if len(chosen) > 1:
        fail(f"--data_dir {path}: has '{chosen[0]}' and '{chosen[1]}'; keep one of them")
    uses = {"train": "train", **dict.fromkeys(chosen, "choose")}
    if "test" in tops:
        uses["test"] = "test" if chosen else "choose"
    words = {"train": "trains", "choose": "chooses the best model", "test": "is reported once at the end"}
    if len(uses) == 2:
        words["choose"] += " and tests it"
    if len(uses) > 1:
        print(", ".join(f"{path / name} {words[use]}" for name, use in uses.items()))
    return uses


def find_photos(path, classes):
    """Name, size, time, label, what it is for (None: the digest decides), and a reader, of each photo."""
    if path.is_dir():
        paths = [found for pattern in ("*/*", "*/*/*") for found in path.glob(pattern) if found.is_file()]
        files = {p.relative_to(path).parts: (p.stat().st_size, p.stat().st_mtime, p.read_bytes) for p in paths}
    elif path.is_file():
        try:
            archive = tarfile.open(path)
            members = [member for member in archive if member.isfile()]
        except Exception as error:  # each compression has its own types
            fail(f"--data_dir {path}: is not a complete tar archive ({first_line(error)}); copy it again")
        files = {Path(one.name).parts[1:]: (one.size, one.mtime, partial(read_member, archive, one)) for one in members}
    else:
        fail(f"--data_dir {path}: there is no such folder or archive")
    uses = parts_of(path, files)
    names = [unicodedata.normalize("NFC", name) for name in classes]  # a Mac writes others
    photos = []
    for parts, (size, changed, reader) in sorted(files.items()):
        is_photo = parts[-1:] and parts[-1].lower().endswith(EXTENSIONS)
        is_placed = len(parts) == 3 and parts[0] in uses if uses else len(parts) == 2
        if not is_photo or not is_placed or any(part.startswith(".") for part in parts):
            continue
        name = unicodedata.normalize("NFC", parts[-2])
        if name not in names:
            fail(f"--data_dir {path}: '{name}' is no class of the network; its classes: {', '.join(classes)}")
        use = uses[parts[0]] if len(uses) > 1 else None
        photos.append(("/".join(parts), size, changed, names.index(name), use, reader))
    if not photos:
        fail(f"--data_dir {path}: contains no photos in folders of its classes: {', '.join(classes)}")
    return photos


class Examples:
    """The features of each photo in each view, in a file: the same memory is enough for any number of photos.

    The system keeps the file in the memory that is left. Photos that were read before are not read again, also if that
    ended early.
    """

    def __init__(self, photos, record, selection, output, args):
        self.size, self.part, self.shapes = record["size"], record["parts"][args.engine.name], selection["features"]
        self.ends = np.cumsum([int(np.prod(shape)) for shape in self.shapes.values()])
        self.bytes, self.count = 4 * int(self.ends[-1]), len(photos)
        self.views = 2 if record["recipe"]["augment"] == "flip" else 1
        self.deadline, self.batch = args.deadline, record["recipe"]["batch_size"]
        self.checkpoint_minutes = args.checkpoint_minutes
        if photos[0][4] is not None and args.test_fraction:
            fail("--test_fraction: the photos have a folder for testing; leave it out")
        path, about = output / "features.bin", output / "features.json"
        key = json.loads(json.dumps([record["id"], selection["name"], [photo[:5] for photo in photos]]))
        known = read_json(about, "remove it") if about.exists() and path.exists() else {}
        digests = known.get("digests", [])
        written = ((self.views - 1) * self.count + len(digests)) * self.bytes
        if known.get("key") != key or path.stat().st_size < written:  # of other photos, or damaged
            remove(about, path)
            digests = []
        if len(digests) < self.count:
            self._check_disk(output, (HERE / args.engine.file).stat().st_size)
            del digests[len(digests) - len(digests) % self.part :]
            network = Network(args.engine(record, args.threads), selection)
            try:
                self._write(path, photos, digests, network, lambda: write_json(about, {"key": key, "digests": digests}))
            except OSError as error:
                fail(f"{path}: cannot be written: {error.strerror}")
            finally:
                if not about.exists():
                    remove(path)
        self.labels = np.array([photo[3] for photo in photos], np.int32)
        intact = [row for row in range(self.count) if digests[row] is not None]
        if len(intact) < self.count and not args.skip_broken:
            name = photos[digests.index(None)][0]
            fail(f"{name}: cannot be read as an image; remove it, or leave such photos out with --skip_broken")
        uses = [photos[row][4] for row in intact]
        if photos[0][4] is None:
            fraction = args.test_fraction or record["recipe"]["test_fraction"]
            tested = tested_digests([(photos[row][3], digests[row]) for row in intact], fraction)
            uses = ["choose" if digests[row] in tested else "train" for row in intact]
        rows = {want: [row for row, use in zip(intact, uses) if use == want] for want in ("train", "choose", "test")}
        self.train, self.test, self.held_out = (np.array(each, np.int64) for each in rows.values())
        missing = {*range(len(record["classes"]))} - {*self.labels[self.train].tolist()}
        if missing or not len(self.test):
            what = f"to train on of '{record['classes'][min(missing)]}'" if missing else "to test on"
            fail(f"--data_dir {args.data_dir}: has no photos {what}; add some")
        self.fingerprint = hashlib.sha256(json.dumps([digests, self.labels.tolist(), uses]).encode()).hexdigest()
        self.file = path.open("rb")

    def _write(self, path, photos, digests, network, save):
        """Write the file from the first photo on that has no digest, and append its digest, None if it is broken.

        `save` writes the digests, from which the next start goes on.
        """
        started = first = saved = time.monotonic()
        before = len(digests)
        pixels = np.zeros((self.part, self.size, self.size, 3), np.float32)
        with path.open("r+b" if path.exists() else "w+b") as file:

            def keep():
                file.flush()
                os.fsync(file.fileno())
                save()

            for start in range(before, len(photos), self.part):
                for place, (name, *_, reader) in enumerate(photos[start : start + self.part]):
                    try:
                        free_mb = free_memory_mb(counts_swap=False)
                        image = read_photo(reader(), self.size, MAX_MB if free_mb is None else free_mb)
                        pixels[place] = image
                        digests.append(digest(image))
                    except Exception as error:  # Pillow raises many types
                        print(f"\r{name}: cannot be read as an image: {first_line(error)}", file=sys.stderr)
                        digests.append(None)
                for view in range(self.views):
                    images = np.ascontiguousarray(pixels[:, :, ::-1]) if view else pixels
                    found = network.call("features", images=images)
                    rows = np.concatenate([found[name].reshape(self.part, -1) for name in self.shapes], axis=1)
                    file.seek((view * self.count + start) * self.bytes)
                    file.write(rows[: len(digests) - start].tobytes())
                show(f"reading photos: {len(digests)} of {len(photos)}")
                if start == before:
                    first = time.monotonic()  # the engine makes itself ready in the first part
                self._check_time(started, first, len(digests), before)
                if time.monotonic() - saved > 60 * self.checkpoint_minutes:
                    keep()
                    saved = time.monotonic()
            keep()

    def _check_disk(self, output, file_bytes):
        """Stop now if the disk has no room for the features and for a checkpoint that replaces another."""
        state = 3 * file_bytes  # weights, momentum and best weights are at most that
        needed, free = self.views * self.count * self.bytes + 2 * state, shutil.disk_usage(output).free
        if needed > free:
            fail(f"--output {output}: features of {self.count} photos, and training, take {needed / 1e6:,.0f} MB, and "
                 f"the disk has {free / 1e6:,.0f} MB left; free some, or give another --output")  # fmt: skip

    def _check_time(self, started, first, done, before):
        """Stop as soon as it is clear that no time will be left to train after the photos are read.

        As after the photos, the program loads the network, trains on a batch at least, and tests a part. A step takes
        about three forward passes.
        """
        if not 4 * self.part <= done - before or done == self.count:
            return
        a_photo = (time.monotonic() - first) / (done - before - self.part)
        needed = a_photo * (self.count - done + 3 * self.batch + self.part) + (first - started)
        if needed > left(self.deadline):
            total = time.monotonic() - START + needed
            fail(f"--deadline: {self.count} photos take {a_photo * self.count:,.0f} s to read on this board, "
                 f"{1e3 * a_photo:,.0f} ms each; give more than {total:,.0f} s, or fewer photos")  # fmt: skip

    def read(self, rows, views):
        """Features of at most `part` photos; the rest of the part is 0."""
        flat = np.zeros((self.part, self.bytes // 4), np.float32)
        for place, row in enumerate(views * self.count + rows):
            flat[place] = np.frombuffer(os.pread(self.file.fileno(), self.bytes, int(row) * self.bytes), np.float32)
        parts = zip(self.shapes.items(), np.split(flat, self.ends[:-1], axis=1))
        return {name: np.reshape(values, (self.part, *shape)) for (name, shape), values in parts}
