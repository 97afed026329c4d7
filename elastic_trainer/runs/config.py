"""Options in config.json: which may change when a run continues (--resume), and what did; `cli.commands` checks it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_trainer.errors import UserError
from elastic_trainer.networks.names import is_custom_model
from elastic_trainer.registry import DATASETS
from elastic_trainer.runs.reader import config_of_model, is_run, read_config
from elastic_trainer.settings import MAIN_FLAGS, NetworkSettings, RunSettings

if TYPE_CHECKING:
    import keras

# Options that may change when a run continues.
FREE_ON_RESUME = {"command", *(name for name, flag in MAIN_FLAGS.items() if flag.is_free)}


def without_effect(config: dict[str, Any]) -> set[str]:
    """Options that do not change the result of a run, unless they say which images there are, or what a step takes."""
    return (
        FREE_ON_RESUME
        - {"micro_batch"}
        - ({"data_dir", "skip_broken"} if DATASETS[config["dataset_name"]].is_folder else set())
    )


def first_change(now: dict[str, Any], before: dict[str, Any], free: set[str]) -> str | None:
    """The first option not in `free` that differs between two configurations, as "--name was, not is"."""
    for name, value in now.items():
        unknown_yet = name == "num_classes" and value is None
        if name not in free and not unknown_yet and value != before.get(name, value):
            return f"--{name} {before[name]}, not {value}"
    return None


def changed_images(now: dict[str, Any], before: dict[str, Any] | None) -> str | None:
    """How the images of a run differ from those that it was started with, by `ImageData.record`; None: they do not.

    A run of an earlier version has no record and is not compared.
    """
    if before is None:
        return None
    change = changed_class(now["class_names"], before["class_names"])
    for kind in ("training", "test", "held_out"):
        is_, was = now.get(f"{kind}_images"), before.get(f"{kind}_images")
        if change is None and is_ != was:
            change = f"other {kind.replace('_', '-')} images ({was}; now {is_})"
    if change is not None and now.get("digests") != before.get("digests"):
        return "an earlier version, which compared and split photos by whole files, metadata included"
    return change


def changed_class(now: Sequence[str], before: Sequence[str]) -> str | None:
    """How two lists of class names differ, as "class 3 'was', not 'is'"; None if they are equal."""
    if len(now) == len(before):
        pairs = enumerate(zip(now, before, strict=True), 1)
        return next((f"class {number} '{was}', not '{is_}'" for number, (is_, was) in pairs if is_ != was), None)
    sides = (("missing", before, now), ("new", now, before))
    found = [f"'{name}' is {what}" for what, some, others in sides for name in some if name not in others]
    return f"{len(before)} classes, not {len(now)} ({', '.join(found[:3])}{', …' if len(found) > 3 else ''})"


# --- the network that code of the user makes --------------------------------------------------------------------------


def network_record(model: keras.Model) -> dict[str, str]:
    """What config.json keeps of a custom network, whose file may be edited later: digests of what it computes."""
    import keras
    import tensorflow as tf

    from elastic_trainer.machine import has_gpu
    from elastic_trainer.task import ImageClassification
    from elastic_trainer.timing.graph_digest import network_digest

    task = ImageClassification(model)
    return {
        "inference": network_digest(task, training=False),
        "training": network_digest(task, training=True),
        "precision": keras.config.dtype_policy().name,
        "made_with": f"TensorFlow {tf.__version__}, Keras {keras.__version__}, {'GPU' if has_gpu() else 'CPU'}",
    }


def is_same_network(now: dict[str, str], before: dict[str, str], digests: Sequence[str]) -> bool | None:
    """Whether two records of a network have the same `digests`; None: those of other versions cannot be compared."""
    if all(now[name] == before[name] for name in digests):
        return True
    return False if all(now[name] == before[name] for name in ("made_with", "precision")) else None


def check_network(now: dict[str, str], before: dict[str, str] | None, what: str, digests: Sequence[str]) -> None:
    """Refuse a custom network that is not the one of a run, or print a line if that cannot be known.

    Args:
        now, before: see `network_record`; `before` is None for a run that recorded none.
        what: the flag and the model's name, for the message.
        digests: of the record, those that must be equal.
    """
    is_same = None if before is None else is_same_network(now, before, digests)
    if is_same is False:
        raise UserError(f"{what} computes something else than the network that was trained; give the file as it was")
    if before is None:
        print(f"{what} is built as it is now; the run does not record what it was")
    elif is_same is None:
        print(f"{what} is built as it is now; that it is the same as with {before['made_with']} cannot be checked")


def custom_network_record(model: keras.Model, network: NetworkSettings, run: RunSettings) -> dict[str, str] | None:
    """The `network_record` of a custom network; None for others.

    It is refused if the run to continue has another one; a line is printed if `--weights` are of another one.
    """
    if not is_custom_model(network.model_name):
        return None
    made = network_record(model)
    if run.resume and is_run(run.folder):
        what = f"--resume {run.folder}: {network.model_name}"
        check_network(made, read_config(run.folder).get("network"), what, ["inference", "training"])
    earlier = config_of_model(Path(network.weights))
    # Digests differ, too, where only the head or the size of images does.
    is_alike = all(earlier.get(name) == getattr(network, name) for name in ("num_classes", "input_size"))
    if is_alike and earlier.get("network") and is_same_network(made, earlier["network"], ["inference"]) is False:
        print(f"--weights {network.weights}: were trained in a network that computed something else")
    return made
