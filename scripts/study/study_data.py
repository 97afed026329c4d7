"""The data sets of the study, as image folders made of links.

grocery       Grocery Store Dataset (Klasson et al., WACV 2019): 81 classes, the authors' own split
sign_digits   Sign Language Digits Dataset (Mavi, arXiv 2011.08927): 10 classes, split by person. Photo n is of
              person (n - 1118) // 10
dogs          six breeds of Imagewoof (fastai), all classes of ImageNet
"""

from __future__ import annotations

import shutil
from pathlib import Path

from elastic_trainer.system.errors import UserError

INPUT_SIZES = {"grocery": 160, "sign_digits": 96, "dogs": 160}  # in pixels, of the network


def split_folder(root: Path, name: str, place: Path) -> Path:
    """The image folder with train/ and test/ in `place`, where an existing one is kept.

    `root` holds the data sets' folders; `name` is one of `INPUT_SIZES`. Raises `UserError` if it is not there.
    """
    source, folder = root / name, place / f"{name}_test"
    if folder.is_dir():
        return folder
    if not source.is_dir():
        raise UserError(f"--data_root {root}: has no folder {name}; get the data sets of scripts/study/study_data.py")
    making = folder.with_name(f"{folder.name}.making")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    if name == "sign_digits":
        _link_persons(source.absolute(), making)
    else:
        for part in ("train", "test"):
            (making / part).symlink_to((source / part).absolute())
    making.replace(folder)
    return folder


def person_of(path: Path) -> int:
    """Whose hand a photo of sign_digits shows, by its name: 217 numbers in 0…488."""
    return (int(path.stem.removeprefix("IMG_")) - 1118) // 10


def _link_persons(source: Path, folder: Path) -> None:
    """Of every five persons, one is for testing, one is left out (it chose settings before), and three train."""
    for path in sorted(source.glob("[0-9]/*.JPG")):
        part = {0: "test", 1: None}.get(person_of(path) % 5, "train")
        if part is not None:
            place = folder / part / path.parent.name
            place.mkdir(parents=True, exist_ok=True)
            (place / path.name).symlink_to(path)
