"""`python data.py show`: how many images each class has, and what they look like."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont
from tqdm import tqdm

import utils
from elastic_trainer.datasets import images
from elastic_trainer.datasets.sources import find

THUMBNAIL, GAP, CAPTION = 112, 6, 16  # pixels
SHEET_IMAGES = 60  # a contact sheet has about so many, but at least one of each class
MOST_OF_A_CLASS = 6


def show(args: argparse.Namespace) -> None:
    """Print how many images each class has in each split, and draw a contact sheet of each split."""
    source = find(args.dataset_name, args.data_dir, True, args.test_fraction)
    names = source.class_names
    each = max(1, min(MOST_OF_A_CLASS, SHEET_IMAGES // len(names)))
    counts: dict[str, Counter[int]] = {}
    for split, encoded in (("train", source.train), ("test", source.test)):
        seen = counts[split] = Counter()
        shown: dict[int, list[Image.Image | None]] = {}
        broken: list[str] = []
        for k, (example, label) in enumerate(tqdm(encoded.examples(), split, encoded.count, leave=False, unit="image")):
            seen[label] += 1
            if seen[label] > each:
                continue
            try:
                picture = Image.fromarray(images.decode(example, THUMBNAIL))
            except Exception as error:  # Pillow raises many kinds for a damaged image
                picture = None
                broken.append(images.told(example, k, error))
            shown.setdefault(label, []).append(picture)
        path = args.output.with_name(f"{args.output.name}_{split}.png")
        with utils.atomic_path(path) as temporary:
            contact_sheet([(names[label], picture) for label in sorted(shown) for picture in shown[label]]).save(
                temporary
            )
        print(f"{split}: {path}")
        for why in broken:
            print(why)
    width = max(5, *(len(name) for name in names))
    for name, *numbers in (
        ("class", "train", "test"),
        *((name, counts["train"][k], counts["test"][k]) for k, name in enumerate(names)),
        (f"{len(names)} classes", counts["train"].total(), counts["test"].total()),
    ):
        print(f"{name:{width}}  {numbers[0]:>7}  {numbers[1]:>7}")


def contact_sheet(pictures: Sequence[tuple[str, Image.Image | None]]) -> Image.Image:
    """Pictures [THUMBNAIL, THUMBNAIL] with their names below; None is one that is broken."""
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
