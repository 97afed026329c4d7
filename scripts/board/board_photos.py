"""The photos that a board trains on, and their features in a file. Part of board_train.py; NumPy and Pillow alone.

Photos are found, decoded and split into those to train on and those to test on as `main.py` does it.
"""

import hashlib
import json
import os
import sys
import time
from collections import namedtuple

import board_device as device
import numpy as np
from board_decoding import MAX_MB, digest, read_photo
from board_layout import CHOOSE, TEST, TRAIN, class_folders, find_photos, find_training_parts, tested_digests
from board_memory import free_memory_mb

HEAD = [("state", "<u4"), ("digest", "<u8")]  # of a row of the file of features, 12 bytes
READ, BROKEN = 1, 2

Photo = namedtuple("Photo", "path size changed label part")  # part: None: the digest decides


def photos_in(data_dir, classes):
    """All photos of a folder, as `main.py` finds them, and in its order."""
    photos = []
    try:
        parts, notes = find_training_parts(data_dir)
        for part, folder in parts.items():
            for path, label in find_photos(class_folders(folder), classes, notes):
                about = os.lstat(path)
                name = os.path.relpath(path, str(data_dir))
                photos.append(Photo(name, about.st_size, about.st_mtime, label, part if len(parts) > 1 else None))
    except ValueError as error:
        device.fail(f"--data_dir {data_dir}: {error}")
    for note in notes:
        device.say(note)
    if not photos:
        device.fail(f"--data_dir {data_dir}: contains no photos in folders of its classes: {', '.join(classes)}")
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
        self.views = 1 + (record["recipe"]["augment"] == "flip")
        self.row = np.dtype([*HEAD, ("values", "<f4", (self.views, int(self.ends[-1])))])
        self.photos, self.data_dir, path = photos, args.data_dir, output / "features.bin"
        key = hashlib.sha256(json.dumps([record["id"], photos]).encode()).digest()
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
        self._split(record)

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
                    most_mb = free_memory_mb(counts_swap=False) or MAX_MB
                    image = read_photo(str(self.data_dir / photo.path), self.size, most_mb)
                    pixels[place], rows["digest"][place], rows["state"][place] = image, digest(image), READ
                except Exception as error:  # Pillow raises many types
                    line = f"\r{photo.path}: is left out, it cannot be read: {device.first_line(error)}"
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
            if device.left(deadline) <= 0:
                told = "give more time, or fewer photos; those are not read again"
                device.fail(f"--deadline: it is over, and {done} of {count} photos are read; {told}")
            if device.caught or time.monotonic() - saved > device.CHECKPOINT_SECONDS:
                os.fsync(self.file.fileno())
                saved = time.monotonic()
            if device.caught:
                device.stop(f"after {done} of {count} photos")

    def _split(self, record):
        """Which photos train, choose the best model, and test it."""
        self.labels = np.array([photo.label for photo in self.photos], np.int32)
        digests = self.heads["digest"].tolist()
        intact = np.flatnonzero(self.heads["state"] == READ).tolist()
        parts = {row: self.photos[row].part for row in intact}
        if self.photos[0].part is None:
            pairs = [(self.photos[row].label, digests[row]) for row in intact]
            tested = tested_digests(pairs, record["recipe"]["test_fraction"])
            parts = {row: CHOOSE if digests[row] in tested else TRAIN for row in intact}
        rows = ([row for row in intact if parts[row] == part] for part in (TRAIN, CHOOSE, TEST))
        self.train, self.test, self.held_out = (np.array(each, np.int64) for each in rows)
        missing = {*range(len(record["classes"]))} - {*self.labels[self.train].tolist()}
        if missing or not len(self.test):
            what = f"to train on of '{record['classes'][min(missing)]}'" if missing else "to test on"
            device.fail(f"--data_dir {self.data_dir}: has no photos {what}; add some")
        content = json.dumps([digests, self.labels.tolist(), [*parts.values()]])
        self.fingerprint = hashlib.sha256(content.encode()).hexdigest()

    def read(self, rows, views):
        """Features of at most `part` photos; the rest of the part is 0."""
        flat, size = np.zeros((self.part, int(self.ends[-1])), np.float32), 4 * int(self.ends[-1])
        for place, (row, view) in enumerate(zip(rows, np.broadcast_to(views, len(rows)))):
            flat[place] = np.frombuffer(self._bytes(row, 12 + int(view) * size, size), "<f4")
        parts = zip(self.shapes.items(), np.split(flat, self.ends[:-1], axis=1))
        return {name: np.reshape(values, (self.part, *shape)) for (name, shape), values in parts}
