"""`python data.py show`: prints how many images each class has, and draws a contact sheet of each split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from elastic_trainer.datasets.images import decoded
from elastic_trainer.datasets.sources import find
from elastic_trainer.errors import importing
from elastic_trainer.files import atomic_path
from elastic_trainer.settings import DataSettings

with importing("data.py show"):
    from PIL import Image, ImageDraw, ImageFont

THUMBNAIL, GAP, CAPTION = 112, 6, 16  # pixels
SHEET_IMAGES = 60  # approximate size of a contact sheet, which shows at least one image of each class
MAX_PER_CLASS = 6
MAX_REASONS = 10  # broken images that are listed for each split


def show(settings: DataSettings, output: Path) -> None:
    """Print the number of images of each class and part, and write `output`_train.png, `output`_test.png, ….

    All images are decoded. Broken ones are counted in a separate column, listed, and marked on the sheets.
    """
    source = find(settings)
    names = source.class_names
    per_class = max(1, min(MAX_PER_CLASS, SHEET_IMAGES // len(names)))
    counts: dict[str, Counter[int]] = {}
    broken: Counter[int] = Counter()
    for part, files in source.parts().items():
        split = "train" if part == "training" else part
        intact = counts[split] = Counter()
        pictures: dict[int, list[Image.Image | None]] = {}  # at most `per_class` of each label; None: broken
        reasons = []
        for image, example in decoded([files], THUMBNAIL):
            (intact if image is not None else broken)[example.label] += 1
            if example.why_broken is not None:
                reasons.append(example.why_broken)
            shown = pictures.setdefault(example.label, [])
            if len(shown) < per_class:
                shown.append(None if image is None else Image.fromarray(image))
        path = output.with_name(f"{output.name}_{split}.png")
        with atomic_path(path) as temporary:
            contact_sheet([(names[k], picture) for k in sorted(pictures) for picture in pictures[k]]).save(temporary)
        print(f"{split}: {path}")
        for why in reasons[:MAX_REASONS]:
            print(why)
        if len(reasons) > MAX_REASONS:
            print(f"… and {len(reasons) - MAX_REASONS} more broken images")
    _print_table(names, {**counts, "broken": broken} if broken else counts)
    if broken:
        print("broken images are in no other column; a run leaves them out")


def _print_table(names: Sequence[str], counts: Mapping[str, Counter[int]]) -> None:
    """Print a row for each class, and the sums; `counts`: head of a column -> images by label."""
    width, wide = max(5, *map(len, names)), max(7, *map(len, counts))
    for name, *numbers in (
        ("class", *counts),
        *((name, *(column[k] for column in counts.values())) for k, name in enumerate(names)),
        (f"{len(names)} classes", *(column.total() for column in counts.values())),
    ):
        print("  ".join([f"{name:{width}}", *(f"{number:>{wide}}" for number in numbers)]))


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
