#!/usr/bin/env python
"""Pre-train the backbone that training on digits starts from.

MobileNetV2 at width 0.35 learns to classify letters. They are drawn from the text fonts in matplotlib's wheel, with
random size, place, rotation, stroke blur, contrast and noise. No digit is drawn, so the later training on handwritten
digits is a true transfer. The seed decides everything, and nothing is downloaded.

Writes weights/mobilenetv2_0.35_glyphs.weights.h5 (the backbone alone) and a .json of the same name with the seed, the
settings, the versions and the accuracy on newly drawn letters. Takes about ten minutes on two cores.

    python scripts/tools/pretrain_glyphs.py
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import keras
import matplotlib
import numpy as np
import tensorflow as tf
from PIL import Image, ImageDraw, ImageFilter, ImageFont
from tqdm import tqdm

import utils
from elastic_trainer.cli.parser import OneLineParser
from elastic_trainer.files import atomic_path, write_json
from elastic_trainer.machine import environment
from elastic_trainer.networks.names import GLYPH_WEIGHTS
from elastic_trainer.options import file_to_write

SIZE, ALPHA = 64, 0.35
SEED, IMAGES, EPOCHS = 0, 16_000, 12
# Lower-case letters with the shape of their capital are left out: at a random size the two look the same.
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ" + "abdefghijlmnqrty"
FONT_PREFIXES = ("DejaVuSans", "DejaVuSerif", "STIXGeneral", "cmr10", "cmb10", "cmss10", "cmtt10")
NO_TEXT_FONTS = ("DejaVuSansDisplay", "DejaVuSerifDisplay")


def text_fonts() -> list[Path]:
    """Font files in matplotlib's wheel with plain Latin letters."""
    fonts = sorted((Path(matplotlib.get_data_path()) / "fonts" / "ttf").glob("*.ttf"))
    return [path for path in fonts if path.stem.startswith(FONT_PREFIXES) and path.stem not in NO_TEXT_FONTS]


def draw_glyph(letter: str, font: Path, rng: np.random.Generator) -> np.ndarray:
    """One light letter on a dark background, uint8 [SIZE, SIZE]; everything except its shape is random."""
    image = Image.new("L", (SIZE, SIZE), 0)
    face = ImageFont.truetype(str(font), int(rng.integers(SIZE // 2, SIZE)))
    centre = SIZE / 2 + rng.uniform(-0.1, 0.1, 2) * SIZE
    ImageDraw.Draw(image).text(tuple(centre), letter, font=face, fill=255, anchor="mm")
    image = image.rotate(float(rng.uniform(-20, 20)), resample=Image.Resampling.BILINEAR)
    image = image.filter(ImageFilter.GaussianBlur(float(rng.uniform(0, 3))))
    pixels = np.asarray(image, np.float32) * rng.uniform(0.5, 1.0) + rng.uniform(0, 60)
    pixels += rng.normal(0, rng.uniform(0, 25), pixels.shape)
    return np.clip(pixels, 0, 255).astype(np.uint8)


def draw_dataset(count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """`count` glyphs, uint8 [count, SIZE, SIZE, 3], and their labels, int32 [count]."""
    fonts = text_fonts()
    labels = rng.integers(0, len(LETTERS), count).astype(np.int32)
    grey = [draw_glyph(LETTERS[label], fonts[rng.integers(len(fonts))], rng) for label in tqdm(labels, "drawing")]
    return np.repeat(np.stack(grey)[..., None], 3, axis=-1), labels


def build_classifier() -> tuple[keras.Model, keras.Model]:
    """The backbone, and a classifier of letters around it."""
    backbone = keras.applications.MobileNetV2(input_shape=(SIZE, SIZE, 3), alpha=ALPHA, include_top=False, weights=None)
    for layer in backbone.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.momentum = 0.9  # Keras' 0.999 needs more steps than this run has
    inputs = keras.Input((SIZE, SIZE, 3))
    features = backbone(keras.layers.Rescaling(1 / 127.5, offset=-1.0)(inputs))
    features = keras.layers.Dropout(0.2)(keras.layers.GlobalAveragePooling2D()(features))
    return backbone, keras.Model(inputs, keras.layers.Dense(len(LETTERS))(features))


def train_on_glyphs(classifier: keras.Model) -> float:
    """Train on drawn letters; returns the accuracy on newly drawn ones, 0…1."""
    rng = np.random.default_rng(SEED)
    images, labels = draw_dataset(IMAGES, rng)
    test_images, test_labels = draw_dataset(2_000, rng)
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
    parser.add_argument("--output", type=file_to_write, default=GLYPH_WEIGHTS, help="a .weights.h5 file")
    args = parser.parse_args()

    keras.utils.set_random_seed(SEED)
    network, classifier = build_classifier()
    accuracy = train_on_glyphs(classifier)
    with atomic_path(args.output) as path:
        network.save_weights(path)
    record = {
        "made_by": "scripts/tools/pretrain_glyphs.py",
        "seed": SEED,
        "train_images": IMAGES,
        "epochs": EPOCHS,
        "input_size": SIZE,
        "alpha": ALPHA,
        "classes": LETTERS,
        "fonts": [font.stem for font in text_fonts()],
        "accuracy_on_2000_fresh_letters": round(accuracy, 4),
        **environment(),
    }
    write_json(args.output.with_name(args.output.name.removesuffix(".weights.h5") + ".json"), record)
    print(f"{args.output}: {accuracy:.1%} on newly drawn letters")


if __name__ == "__main__":
    utils.run_cli(main)
