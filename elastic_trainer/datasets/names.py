"""The data sets that are known by name."""

from __future__ import annotations

TFDS_NAMES = ("caltech_birds2011", "oxford_iiit_pet", "stanford_dogs")
DATASET_NAMES = (*TFDS_NAMES, "digits", "image_folder")
