"""Data sets of tensorflow-datasets with a few images, written by TFDS' own builders, for tests without a network."""

import io

import numpy as np
from PIL import Image

# Number of classes of each data set.
TFDS_CLASSES = {"caltech_birds2011": 200, "oxford_iiit_pet": 37, "stanford_dogs": 120}


def annotations(k):
    """The annotations of image `k` beside its label, by data set. Training ignores them."""
    import tensorflow_datasets as tfds

    box = tfds.features.BBox(0.0, 0.0, 1.0, 1.0)
    return {
        "caltech_birds2011": {
            "image/filename": f"{k}.jpg",
            "label_name": f"bird {k}",
            "bbox": box,
            "segmentation_mask": np.zeros((5, 5, 1), np.uint8),
        },
        "oxford_iiit_pet": {
            "species": k % 2,
            "file_name": f"{k}.jpg",
            "segmentation_mask": np.zeros((5, 5, 1), np.uint8),
            "head_bbox": box,
        },
        "stanford_dogs": {"image/filename": f"{k}.jpg", "objects": [{"bbox": box}]},
    }


def prepare_small(name, folder, monkeypatch, train=8, test=5):
    """Prepare a data set with TFDS' builder and its real features, but with a few grey images; returns the builder.

    Image `i` has label `i` and brightness 30 `i`.
    """
    import tensorflow_datasets as tfds

    builder = tfds.builder(name, data_dir=folder)

    def examples(count):
        for i in range(count):
            image = Image.new("RGB", (10, 20 + i), (30 * i, 30 * i, 30 * i))
            file = io.BytesIO()
            image.save(file, "JPEG")
            file.seek(0)
            yield f"{i}.jpg", {"image": file, "label": i, **annotations(i)[name]}

    with monkeypatch.context() as patch:
        patch.setattr(
            type(builder), "_split_generators", lambda self, _: {"train": examples(train), "test": examples(test)}
        )
        if name == "stanford_dogs":  # its generator reads the names from the downloaded files
            builder.info.features["label"].names = [f"dog {k}" for k in range(120)]
        builder.download_and_prepare()
    return builder
