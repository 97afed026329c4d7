"""The names that `--dataset_name` and `--augment` take. No TensorFlow, so that the command line checks them at once."""

from __future__ import annotations

TFDS_NAMES = ("caltech_birds2011", "oxford_iiit_pet", "stanford_dogs")  # the paper's data sets (section 6)
DATASET_NAMES = (*TFDS_NAMES, "digits", "image_folder")
AUGMENTATIONS = ("none", "flip", "flip_rotate")  # flip: the paper; flip_rotate: its published scripts
