"""The photos that a board trains on, and their features in a file. Part of board_train.py; NumPy and Pillow alone.

Photos are found, decoded and split into those to train on and those to test on as `main.py` does it.
"""

import hashlib
import json
import os
import sys
import time
import unicodedata
from collections import namedtuple

import board_device as device
import numpy as np
from board_decoding import EXTENSIONS, MAX_MB, read_photo
from board_digests import digest, tested_digests
from board_memory import free_memory_mb

VALIDATION = ("val", "valid", "validation")

HEAD = [("state", "<u4"), ("digest", "<u8")]  # of a row of the file of features, 12 bytes
READ, BROKEN = 1, 2

Photo = namedtuple("Photo", "name size changed label use path")  # use: train, choose, test; None: the digest decides


def uses_of(path, files):
    """What the photos are for, by the first folder of their names; empty if these are classes."""
    tops = {parts[0] for parts in files if len(parts) == 3}
    if "train" not in tops:
        return {}
    uses = {"train": "train", **dict.fromkeys(tops.intersection(VALIDATION), "choose")}
    chooses = "chooses the best model" + (" and tests it" if "test" not in tops or len(uses) == 1 else "")
    if "test" in tops:
        uses["test"] = "test" if len(uses) > 1 else "choose"
    words = {"train": "trains", "choose": chooses, "test": "is reported once at the end"}
    if len(uses) > 1:
        device.say(", ".join(f"{path / name} {words[use]}" for name, use in uses.items()))
    return uses


def find_photos(path, classes):
    """All photos of a folder, in the order of their names."""
    if not path.is_dir():
        device.fail(f"--data_dir {path}: there is no such folder")
    paths = [found for pattern in ("*/*", "*/*/*") for found in path.glob(pattern) if found.is_file()]
    files = {found.relative_to(path).parts: found for found in paths}
    uses = uses_of(path, files)
    names = [unicodedata.normalize("NFC", name) for name in classes]  # a Mac writes others
    photos = []
    for parts, found in sorted(files.items()):
        is_placed = len(parts) == 3 and parts[0] in uses if uses else len(parts) == 2
        is_photo = found.name.lower().endswith(EXTENSIONS) and not any(part.startswith(".") for part in parts)
        if not is_photo or not is_placed:
            continue
        name, about = unicodedata.normalize("NFC", parts[-2]), found.stat()
        if name not in names:
            device.fail(f"--data_dir {path}: '{name}' is no class of the network; its classes: {', '.join(classes)}")
        use = uses[parts[0]] if len(uses) > 1 else None
        photos.append(Photo("/".join(parts), about.st_size, about.st_mtime, names.index(name), use, found))
    if not photos:
        device.fail(f"--data_dir {path}: contains no photos in folders of its classes: {', '.join(classes)}")
    return photos


class Examples:
    """The features of each photo in each view, in a file: the same memory is enough for any number of photos.

    The system keeps the file in the memory that is left. It starts with a digest of what it is of; then a row has a
    photo's state (0: not read yet), its digest, and its features. Photos that were read before are not read again, also
    if that ended early. A broken one is left out.
    """

    def __init__(self, photos, record, output, args):
        self.size, self.part, self.shapes = record["size"], record["parts"][args.engine.name], record["features"]
        self.ends = np.cumsum([int(np.prod(shape)) for shape in self.shapes.values()])
        self.batch, self.views = record["recipe"]["batch_size"], 1 + (record["recipe"]["augment"] == "flip")
        self.row = np.dtype([*HEAD, ("values", "<f4", (self.views, int(self.ends[-1])))])
        self.photos, path = photos, output / "features.bin"
        key = hashlib.sha256(json.dumps([record["id"], [photo[:5] for photo in photos]]).encode()).digest()
        self.file, self.start = path.open("r+b" if path.exists() else "w+b"), len(key)
        if self.file.read(len(key)) != key:
            self.file.seek(0)
            self.file.truncate()
            self.file.write(key)
            self.file.flush()
        heads = b"".join(self._bytes(row, 0, 12) for row in range(len(photos)))
        self.heads = np.frombuffer(heads, np.dtype(HEAD)).copy()
        if not self.heads["state"].all():
            try:
                self._write(args.engine(record, args.threads), args.deadline)
            except OSError as error:
                device.fail(f"{path}: cannot be written: {error.strerror}")
        self._split(record, args.data_dir)

    def _bytes(self, row, start, count):
        """Of a row of the file; zeros where it ends early."""
        place = self.start + int(row) * self.row.itemsize + start
        return os.pread(self.file.fileno(), count, place).ljust(count, b"\0")

    def _write(self, network, deadline):
        """Write the rows from the first photo on that is not read yet."""
        before, count = int(np.argmin(self.heads["state"])) // self.part * self.part, len(self.photos)
        pixels, saved = np.zeros((self.part, self.size, self.size, 3), np.float32), time.monotonic()
        for start in range(before, count, self.part):
            rows = np.zeros(min(self.part, count - start), self.row)
            for place, photo in enumerate(self.photos[start : start + self.part]):
                try:
                    free_mb = free_memory_mb(counts_swap=False)
                    image = read_photo(str(photo.path), self.size, MAX_MB if free_mb is None else free_mb)
                    pixels[place], rows["digest"][place], rows["state"][place] = image, digest(image), READ
                except Exception as error:  # Pillow raises many types
                    line = f"\r{photo.name}: is left out, it cannot be read: {device.first_line(error)}"
                    device.say(line, file=sys.stderr)
                    rows["state"][place] = BROKEN
            for view in range(self.views):
                images = np.ascontiguousarray(pixels[:, :, ::-1]) if view else pixels
                found = network.call("features", images=images)
                flat = np.concatenate([found[name].reshape(self.part, -1) for name in self.shapes], axis=1)
                rows["values"][:, view] = flat[: len(rows)]
            self.file.seek(self.start + start * self.row.itemsize)
            self.file.write(rows.tobytes())
            self.file.flush()
            done = start + len(rows)
            for name, _ in HEAD:
                self.heads[name][start:done] = rows[name]
            device.show(f"reading photos: {done} of {count}")
            if start == before:
                first = time.monotonic()  # the engine makes itself ready in the first part
            self._check_time(deadline, time.monotonic() - first, start - before, done)
            if device.caught or time.monotonic() - saved > device.CHECKPOINT_SECONDS:
                os.fsync(self.file.fileno())
                saved = time.monotonic()
            if device.caught:
                device.stop(f"after {done} of {count} photos")

    def _check_time(self, deadline, seconds, read, done):
        """Stop once it is clear, by the `seconds` that so many photos took, that no time will be left to train."""
        if read < 3 * self.part:
            return
        count, a_photo = len(self.photos), seconds / read
        needed = a_photo * (count - done + 3 * self.batch)  # a step takes about three forward passes
        if needed > device.left(deadline):
            device.fail(
                f"--deadline: {count} photos take {a_photo * count:,.0f} s to read on this board, {1e3 * a_photo:,.0f} "
                f"ms each; give more than {time.monotonic() - device.START + needed:,.0f} s, or fewer photos"
            )

    def _split(self, record, data_dir):
        """Which photos train, choose the best model, and test it."""
        self.labels = np.array([photo.label for photo in self.photos], np.int32)
        digests = self.heads["digest"].tolist()
        intact = np.flatnonzero(self.heads["state"] == READ).tolist()
        uses = {row: self.photos[row].use for row in intact}
        if self.photos[0].use is None:
            pairs = [(self.photos[row].label, digests[row]) for row in intact]
            tested = tested_digests(pairs, record["recipe"]["test_fraction"])
            uses = {row: "choose" if digests[row] in tested else "train" for row in intact}
        rows = ([row for row in intact if uses[row] == want] for want in ("train", "choose", "test"))
        self.train, self.test, self.held_out = (np.array(each, np.int64) for each in rows)
        missing = {*range(len(record["classes"]))} - {*self.labels[self.train].tolist()}
        if missing or not len(self.test):
            what = f"to train on of '{record['classes'][min(missing)]}'" if missing else "to test on"
            device.fail(f"--data_dir {data_dir}: has no photos {what}; add some")
        content = json.dumps([digests, self.labels.tolist(), [*uses.values()]])
        self.fingerprint = hashlib.sha256(content.encode()).hexdigest()

    def read(self, rows, views):
        """Features of at most `part` photos; the rest of the part is 0."""
        flat, size = np.zeros((self.part, int(self.ends[-1])), np.float32), 4 * int(self.ends[-1])
        for place, (row, view) in enumerate(zip(rows, np.broadcast_to(views, len(rows)))):
            flat[place] = np.frombuffer(self._bytes(row, 12 + int(view) * size, size), "<f4")
        parts = zip(self.shapes.items(), np.split(flat, self.ends[:-1], axis=1))
        return {name: np.reshape(values, (self.part, *shape)) for (name, shape), values in parts}
