#!/usr/bin/env python
"""Pre-train the network that training on handwritten digits starts from, on printed characters.

MobileNetV2 at width 0.35 learns to classify digits and letters. They are drawn from the text fonts in matplotlib's
wheel, with random slant, width, stroke, place and noise, and reduced to 8×8 pixels as the handwritten digits were. What
is missing is the hand. The seed decides everything, and nothing is downloaded.

Writes weights/mobilenetv2_0.35_glyphs.weights.h5 (the backbone alone), the head for the ten digits (_head.npz), and a
.json with the seed, the settings, the time, the versions and the accuracy on newly drawn characters. Takes about three
minutes on two cores.

    python scripts/tools/pretrain_glyphs.py
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import keras
import matplotlib
import numpy as np
import tensorflow as tf
from PIL import Image, ImageDraw, ImageFilter, ImageFont
from tqdm import tqdm

import utils
from elastic_trainer.settings.flags import OneLineParser, path_to_write
from elastic_trainer.settings.network_names import GLYPH_HEAD, GLYPH_WEIGHTS
from elastic_trainer.system.files import atomic_path, write_json
from elastic_trainer.system.machine import environment

SIZE, ALPHA = 64, 0.35
SEED, IMAGES, EPOCHS, TESTED = 0, 12_000, 5, 2_000
# Letters with the shape of a digit or of another letter are left out: at a random size they look the same.
DIGITS, LETTERS = "0123456789", "ACDEFGHJKLMNPQRTUVWXY" + "adefhijmnrty"
CHARACTERS = DIGITS + LETTERS
SHARES = np.repeat([3.0, 1.0], [len(DIGITS), len(LETTERS)])  # a digit is drawn three times as often as a letter
FONT_PREFIXES = ("DejaVuSans", "DejaVuSerif", "STIXGeneral", "cmr10", "cmb10", "cmss10", "cmtt10")
NO_TEXT_FONTS = ("DejaVuSansDisplay", "DejaVuSerifDisplay")
CANVAS, BITMAP, SCANNED = 96, 32, 8  # pixels a side: of a character as drawn, as black and white, as kept


def text_fonts() -> list[ImageFont.FreeTypeFont]:
    """The fonts in matplotlib's wheel with plain Latin letters and digits."""
    fonts = sorted((Path(matplotlib.get_data_path()) / "fonts" / "ttf").glob("*.ttf"))
    paths = [path for path in fonts if path.stem.startswith(FONT_PREFIXES) and path.stem not in NO_TEXT_FONTS]
    return [ImageFont.truetype(str(path), CANVAS // 2) for path in paths]


def draw_glyph(character: str, font: ImageFont.FreeTypeFont, rng: np.random.Generator) -> np.ndarray:
    """One light character on a dark background, uint8 [SCANNED, SCANNED]; everything except its shape is random.

    As in the handwritten digits, it fills the height of a bitmap, and each value counts the light pixels of 4×4.
    """
    image, centre = Image.new("L", (CANVAS, CANVAS), 0), CANVAS / 2
    ImageDraw.Draw(image).text((centre, centre), character, font=font, fill=255, anchor="mm")
    angle, slant = np.radians(rng.uniform(-10, 10)), rng.uniform(-0.2, 0.2)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]) @ [[1, slant], [0, 1]]
    matrix = np.column_stack([turn, centre - turn @ [centre, centre]])
    image = image.transform(image.size, Image.Transform.AFFINE, matrix.ravel().tolist(), Image.Resampling.BILINEAR)
    left, top, right, bottom = image.getbbox() or (0, 0, CANVAS, CANVAS)
    image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.8, 2.5)))  # makes strokes wider, with the limit below
    height = rng.uniform(0.85, 1.0)  # these are shares of the bitmap
    width = min(height * (right - left) / (bottom - top) * rng.uniform(0.7, 1.3), 1.0)
    wide, high = (right - left) / width, (bottom - top) / height
    x, y = (left + right - wide) / 2 + rng.uniform(-0.06, 0.06) * wide, (top + bottom - high) / 2
    extent = (x, y, x + wide, y + high)
    image = image.transform((BITMAP, BITMAP), Image.Transform.EXTENT, extent, Image.Resampling.BILINEAR)
    drawn = np.asarray(image) > 255 * rng.uniform(0.08, 0.4)
    cells = drawn.reshape(SCANNED, BITMAP // SCANNED, SCANNED, BITMAP // SCANNED)
    pixels = 255 * cells.mean(axis=(1, 3)) + rng.normal(0, rng.uniform(0, 10), (SCANNED, SCANNED))
    return np.clip(np.round(pixels), 0, 255).astype(np.uint8)


def draw_dataset(count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """`count` characters, uint8 [count, SCANNED, SCANNED, 1], and their labels, int32 [count]."""
    fonts = text_fonts()
    labels = rng.choice(len(CHARACTERS), count, p=SHARES / SHARES.sum()).astype(np.int32)
    drawn = [draw_glyph(CHARACTERS[label], fonts[rng.integers(len(fonts))], rng) for label in tqdm(labels, "drawing")]
    return np.stack(drawn)[..., None], labels


def build_classifier() -> tuple[keras.Model, keras.Model]:
    """The backbone, and a classifier of characters around it."""
    backbone = keras.applications.MobileNetV2(input_shape=(SIZE, SIZE, 3), alpha=ALPHA, include_top=False, weights=None)
    for layer in backbone.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.momentum = 0.9  # Keras' 0.999 needs more steps than this run has
    inputs = keras.Input((SCANNED, SCANNED, 1))
    x = keras.layers.Resizing(SIZE, SIZE)(inputs)  # bilinear, as images are read
    x = keras.layers.Rescaling(1 / 127.5, offset=-1.0)(keras.layers.Concatenate()([x, x, x]))
    features = keras.layers.Dropout(0.2)(keras.layers.GlobalAveragePooling2D()(backbone(x)))
    return backbone, keras.Model(inputs, keras.layers.Dense(len(CHARACTERS))(features))


def train_on_glyphs(classifier: keras.Model) -> float:
    """Train on drawn characters; returns the accuracy on newly drawn ones, 0…1."""
    rng = np.random.default_rng(SEED)
    images, labels = draw_dataset(IMAGES, rng)
    test_images, test_labels = draw_dataset(TESTED, rng)
    data = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(IMAGES, seed=SEED)
    data = data.batch(64, drop_remainder=True).prefetch(2)
    rate = keras.optimizers.schedules.CosineDecay(3e-3, EPOCHS * len(data))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    classifier.compile(keras.optimizers.Adam(rate), loss, metrics=["accuracy"])
    classifier.fit(data, epochs=EPOCHS, verbose=2)
    _, accuracy = classifier.evaluate(test_images, test_labels, batch_size=64, verbose=0)
    return float(accuracy)


def main() -> None:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = OneLineParser(prog="pretrain_glyphs.py", description=__doc__, formatter_class=as_written)
    parser.add_argument("--output", type=path_to_write, default=GLYPH_WEIGHTS, help="a .weights.h5 file")
    args = parser.parse_args()

    start = time.perf_counter()
    keras.utils.set_random_seed(SEED)
    network, classifier = build_classifier()
    accuracy = train_on_glyphs(classifier)
    with atomic_path(args.output) as path:
        network.save_weights(path)
    kernel, bias = (weight[..., : len(DIGITS)] for weight in classifier.layers[-1].get_weights())
    with atomic_path(args.output.with_name(GLYPH_HEAD.name)) as path:
        np.savez(path, kernel=kernel, bias=bias)
    record = {
        "made_by": "scripts/tools/pretrain_glyphs.py",
        "seed": SEED,
        "train_images": IMAGES,
        "epochs": EPOCHS,
        "seconds": round(time.perf_counter() - start),
        "input_size": SIZE,
        "alpha": ALPHA,
        "classes": CHARACTERS,
        "fonts": [Path(str(font.path)).stem for font in text_fonts()],
        f"accuracy_on_{TESTED}_fresh_characters": round(accuracy, 4),
        **environment(),
    }
    write_json(args.output.with_name(args.output.name.removesuffix(".weights.h5") + ".json"), record)
    print(f"{args.output}: {accuracy:.1%} on newly drawn characters")


if __name__ == "__main__":
    utils.run_cli(main)
