"""`python data.py show`: prints how many images each class has, and draws a contact sheet of each split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from tqdm import tqdm

import utils
from elastic_trainer.datasets.data_source import DataSource
from elastic_trainer.datasets.decoding import decode, decode_failure
from elastic_trainer.datasets.images import ImageFiles
from elastic_trainer.datasets.sources import find

THUMBNAIL, GAP, CAPTION = 112, 6, 16  # pixels
SHEET_IMAGES = 60  # approximate size of a contact sheet, which shows at least one image of each class
MOST_PER_CLASS = 6


def show(name: str, data_dir: Path | None, test_fraction: float | None, output: Path) -> None:
    """Print the number of images of each class and split, and write `output`_train.png and `output`_test.png.

    Broken images are listed, and marked on the sheets.

    Args:
        name, data_dir, test_fraction: see `sources.find`.
        output: path without "_train.png".

    Raises:
        UserError: see `sources.find`; or a picture cannot be written.
    """
    source = find(name, data_dir, True, test_fraction)
    names = source.class_names
    per_class = max(1, min(MOST_PER_CLASS, SHEET_IMAGES // len(names)))
    counts: dict[str, Counter[int]] = {}
    for split, files in (("train", source.train), ("test", source.test)):
        counts[split], pictures, broken = _count(files, split, per_class)
        path = output.with_name(f"{output.name}_{split}.png")
        with utils.atomic_path(path) as temporary:
            contact_sheet([(names[label], picture) for label in sorted(pictures) for picture in pictures[label]]).save(
                temporary
            )
        print(f"{split}: {path}")
        for line in broken:
            print(line)
    _print_table(source, counts)


def _count(
    files: ImageFiles, split: str, per_class: int
) -> tuple[Counter[int], dict[int, list[Image.Image | None]], list[str]]:
    """Count the images of each class, and decode the first ones.

    Returns:
        Counts by label; at most `per_class` thumbnails by label, None for a broken one; and a line on each of these.
    """
    counts: Counter[int] = Counter()
    pictures: dict[int, list[Image.Image | None]] = {}
    broken: list[str] = []
    for k, (image, label) in enumerate(tqdm(files.examples(), split, files.count, leave=False, unit="image")):
        counts[label] += 1
        if counts[label] > per_class:
            continue
        try:
            picture = Image.fromarray(decode(image, THUMBNAIL))
        except Exception as error:  # Pillow raises many types for a damaged image
            picture = None
            broken.append(decode_failure(image, k, error))
        pictures.setdefault(label, []).append(picture)
    return counts, pictures, broken


def _print_table(source: DataSource, counts: dict[str, Counter[int]]) -> None:
    names = source.class_names
    width = max(5, *(len(name) for name in names))
    for name, *numbers in (
        ("class", "train", "test"),
        *((name, counts["train"][k], counts["test"][k]) for k, name in enumerate(names)),
        (f"{len(names)} classes", counts["train"].total(), counts["test"].total()),
    ):
        print(f"{name:{width}}  {numbers[0]:>7}  {numbers[1]:>7}")


def contact_sheet(pictures: Sequence[tuple[str, Image.Image | None]]) -> Image.Image:
    """A grid of thumbnails [THUMBNAIL, THUMBNAIL] with their captions; None stands for a broken image."""
    columns = min(len(pictures), 12 if len(pictures) > SHEET_IMAGES else 10)
    rows = -(-len(pictures) // columns)
    wide, high = THUMBNAIL + GAP, THUMBNAIL + CAPTION + GAP
    sheet = Image.new("RGB", (columns * wide + GAP, rows * high + GAP), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(11)
    for k, (name, picture) in enumerate(pictures):
        x, y = GAP + k % columns * wide, GAP + k // columns * high
        if picture is not None:
            sheet.paste(picture, (x, y))
        else:
            draw.rectangle((x, y, x + THUMBNAIL - 1, y + THUMBNAIL - 1), outline="red")
            draw.text((x + 6, y + 6), "broken", "red", font)
        caption = name
        while draw.textlength(caption, font) > THUMBNAIL:
            caption = caption[:-2] + "…"
        draw.text((x, y + THUMBNAIL), caption, "black", font)
    return sheet
