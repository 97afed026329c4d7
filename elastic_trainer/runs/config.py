"""What config.json keeps of a run's options: which may change when it continues, and which decide its result."""

from __future__ import annotations

from typing import Any

# Options that may change when a run continues.
FREE_ON_RESUME = {"data_dir", "logdir", "run_name", "command", "resume", "overwrite", "save_txt", "export", "evaluate"}
FREE_ON_RESUME |= {"save_model", "checkpoint_minutes", "checkpoint_steps", "image_memory", "power_csv"}


def without_effect(config: dict[str, Any]) -> set[str]:
    """Options that do not change the result of a run. Of an image_folder, the folder alone identifies the images."""
    return FREE_ON_RESUME - ({"data_dir"} if config["dataset_name"] == "image_folder" else set())


def first_change(now: dict[str, Any], before: dict[str, Any], free: set[str]) -> str | None:
    """The first option, except those in `free`, in which two configurations differ, as "--name was, not is"."""
    for name, value in now.items():
        unknown_yet = name == "num_classes" and value is None
        if name not in free and not unknown_yet and value != before.get(name, value):
            return f"--{name} {before[name]}, not {value}"
    return None
