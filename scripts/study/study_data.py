"""The data sets of the study, as image folders made of links: to tune on `val`, to report on `test`.

grocery       Grocery Store Dataset (Klasson et al., WACV 2019): 81 classes, the authors' own split
sign_digits   Sign Language Digits Dataset (Mavi, arXiv 2011.08927): 10 classes, split by person. Photo n is of
              person (n - 1118) // 10
dogs          six breeds of Imagewoof (fastai), all classes of ImageNet; `val` is every fifth training photo
"""

from __future__ import annotations

import shutil
from pathlib import Path

from elastic_trainer.system.errors import UserError

INPUT_SIZES = {"grocery": 160, "sign_digits": 96, "dogs": 160}  # in pixels, of the network


def split_folder(root: Path, name: str, split: str, place: Path) -> Path:
    """The image folder with train/ and test/ in `place`, where an existing one is kept; test/ has those of `split`.

    `root` holds the data sets' folders; `name` is one of `INPUT_SIZES`. Raises `UserError` if it is not there.
    """
    source, folder = root / name, place / f"{name}_{split}"
    if folder.is_dir():
        return folder
    if not source.is_dir():
        raise UserError(f"--data_root {root}: has no folder {name}; get the data sets of scripts/study/study_data.py")
    making = folder.with_name(f"{folder.name}.making")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    if name == "grocery":
        for part, what in (("train", "train"), ("test", split)):
            (making / part).symlink_to((source / what).absolute())
    elif name == "dogs":
        _link_photos(source.absolute(), making, split)
    else:
        _link_persons(source.absolute(), making, split)
    making.replace(folder)
    return folder


def person_of(path: Path) -> int:
    """Whose hand a photo of sign_digits shows, by its name: 217 numbers in 0…488."""
    return (int(path.stem.removeprefix("IMG_")) - 1118) // 10


def _link_photos(source: Path, folder: Path, split: str) -> None:
    """Of every five training photos of a class, one is for `val`, and four are for training."""
    for path in sorted(source.glob("train/*/*")):
        is_val = sum(map(ord, path.stem)) % 5 == 0
        if not is_val or split == "val":
            _link(path, folder / ("test" if is_val else "train"))
    if split == "test":
        (folder / "test").symlink_to(source / "test")


def _link_persons(source: Path, folder: Path, split: str) -> None:
    """Of every five persons, one is for `test`, one for `val`, and three are for training."""
    for path in sorted(source.glob("[0-9]/*.JPG")):
        part = {0: "test", 1: "val"}.get(person_of(path) % 5, "train")
        if part in ("train", split):
            _link(path, folder / ("train" if part == "train" else "test"))


def _link(photo: Path, part: Path) -> None:
    """Link a photo from the folder of its class in `part`."""
    place = part / photo.parent.name
    place.mkdir(parents=True, exist_ok=True)
    (place / photo.name).symlink_to(photo)
