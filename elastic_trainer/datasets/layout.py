"""Folders of photos: which of them train, choose the best model, and test; and the photos of each class.

A board gets a copy of this file (`board.export`), so it imports nothing but Python's own modules, from 3.6 on.
"""

import os
import re
import unicodedata
from pathlib import Path
from typing import Collection, Dict, List, Mapping, Sequence, Set, Tuple

TRAIN, CHOOSE, TEST = "train", "choose", "test"  # what photos are for
# As people spell their folders, whatever the case; such as train_set or test-images, too.
SPELLINGS = {TRAIN: "train(ing)?", CHOOSE: "val(id(ation|ate)?)?|dev", TEST: "test(ing)?"}
ENDINGS = "([ _-]?(set|data|images|photos))?"
WANTED = "train/<class>/ and test/<class>/, or with <class>/ alone"


def find_parts(folder: Path) -> Tuple[Dict[str, Path], List[str]]:
    """The folders in `folder` by what they are for, and notes on what may not be as it seems.

    Those with the name of a part are parts if one of them holds folders; else all are classes, and `folder` itself
    trains. Where no part chooses the best model, the one that tests does. Raises `ValueError` if `folder` is none, or
    has two for one part; `OSError` if one cannot be read.
    """
    if not folder.is_dir():
        raise ValueError(f"is no folder; give one with {WANTED}")
    named: List[Tuple[str, Path]] = []
    others: List[str] = []
    for path in (path for paths in class_folders(folder).values() for path in paths):
        found = [part for part in SPELLINGS if re.fullmatch(f"({SPELLINGS[part]}){ENDINGS}", path.name, re.IGNORECASE)]
        named += [(part, path) for part in found]
        others += [] if found else [path.name]
    names = ", ".join(f"'{path.name}'" for _, path in named)
    if not any(class_folders(path) for _, path in named):
        return {TRAIN: folder}, [f"without folders in it, read as a class: {names}"] if named else []
    parts = dict(named)
    if len(parts) < len(named):
        raise ValueError(f"has {names}; keep one for each of train, val and test")
    if CHOOSE not in parts and TEST in parts:
        parts[CHOOSE] = parts.pop(TEST)
    notes = [f"not read in {folder}, beside {names}: {_few(others)}"] if others else []
    return {part: parts[part] for part in SPELLINGS if part in parts}, notes


def find_training_parts(folder: Path) -> Tuple[Dict[str, Path], List[str]]:
    """The same, with a note on who does what. Raises `ValueError` also if none trains."""
    parts, notes = find_parts(folder)
    if TRAIN not in parts:
        raise ValueError(f"has '{parts[CHOOSE].name}' but no 'train' with one folder for each class")
    if CHOOSE in parts:
        end = f", {parts[TEST]} is reported once at the end" if TEST in parts else " and tests it"
        notes.append(f"{parts[TRAIN]} trains, {parts[CHOOSE]} chooses the best model{end}")
    return parts, notes


def class_folders(folder: Path) -> Dict[str, List[Path]]:
    """The folders of each class in `folder`, in the order of the labels.

    Whether é is one character or two, as from a Mac, makes no difference; names are UTF-8 in any locale.
    """
    found: Dict[str, List[Path]] = {}
    for path in folder.iterdir():
        if path.is_dir() and not path.name.startswith("."):
            name = os.fsencode(path.name).decode("utf-8", "surrogateescape")
            found.setdefault(unicodedata.normalize("NFC", name), []).append(path)
    return {name: sorted(found[name]) for name in sorted(found)}


def find_photos(
    folders: Mapping[str, Sequence[Path]], classes: Sequence[str], notes: List[str]
) -> List[Tuple[str, int]]:
    """The files in the `folders` of classes, with their labels. Adds a line to `notes` if there are folders in these.

    Names that start with a dot are skipped: macOS puts such a file beside each photo. Raises `ValueError` if there is a
    folder of a class that is not one of `classes`.
    """
    unknown = [name for name in folders if name not in classes]
    if unknown:
        raise ValueError(f"class '{unknown[0]}' is not among {_few(classes)}; rename or remove it")
    photos: List[Tuple[str, int]] = []
    ignored: List[str] = []
    for label, place in ((label, place) for label, name in enumerate(classes) for place in folders.get(name, ())):
        for path in sorted(entry.path for entry in os.scandir(place) if entry.name[0] != "."):
            if os.path.isdir(path):
                ignored.append(path)
            else:
                photos.append((path, label))
    if ignored:
        inside = f"within those of classes, such as {ignored[0]}; move the images up to use them"
        notes.append(f"ignored: {len(ignored)} folder(s) {inside}")
    return photos


def tested_digests(photos: Collection[Tuple[int, int]], fraction: float) -> Set[int]:
    """The digests of the photos that are for testing where no folder is, from the label and the digest of each.

    A digest is an even draw from 0 to 2^64, and those below `fraction` of that are for testing. So a photo stays where
    it is whatever is added, removed, renamed or copied, and copies of a photo stay together. Only in a class that would
    be left without test photos, its smallest digest is tested nevertheless; in one that would be left without training
    photos, the largest trains.
    """
    tested = {number for _, number in photos if number < fraction * 2**64}
    of_class: Dict[int, Set[int]] = {}
    for label, number in photos:
        of_class.setdefault(label, set()).add(number)
    for numbers in of_class.values():
        if numbers.isdisjoint(tested):
            tested.add(min(numbers))
        if numbers <= tested:
            tested.remove(max(numbers))
    return tested


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (", …" if len(names) > 10 else "")
