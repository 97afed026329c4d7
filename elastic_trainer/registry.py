"""Registries of schemes, importances, data sets and exporters by name (no TensorFlow here).

Each has one entry here. Extensions and other programs add entries with `Registry.add` and `add_importance`; parsers,
records, figures and docs/flags.md read them. An entry refers to its code by module and name, which is imported at the
first call.
"""

from __future__ import annotations

import argparse
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from elastic_trainer.errors import UserError, not_one_of

if TYPE_CHECKING:
    from elastic_trainer.options import Flag

Entry = TypeVar("Entry")


class Lazy:
    """The callable at `place`, "module:name", imported when it is first called; `arguments` are added to each call."""

    def __init__(self, place: str, **arguments: Any) -> None:
        self._place, self._arguments = place, arguments

    def __call__(self, *args: Any, **more: Any) -> Any:
        module, _, name = self._place.partition(":")
        return getattr(import_module(module), name)(*args, **self._arguments, **more)

    def __repr__(self) -> str:
        return f"Lazy({self._place!r})"


class Registry(dict[str, Entry], Generic[Entry]):
    """Entries by name. Looking up an unknown one raises `UserError`, which names `flag`, whose values the names are."""

    def __init__(self, flag: str) -> None:
        super().__init__()
        self.flag = flag

    def add(self, name: str, entry: Entry) -> None:
        """Add an entry. Raises `ValueError` if the name is registered already."""
        if name in self:
            raise ValueError(f"{self.flag} {name}: is registered already")
        self[name] = entry

    def __missing__(self, name: str) -> NoReturn:
        raise UserError(f"{self.flag}: {not_one_of(name, [*self])}")


@dataclass(frozen=True)
class SchemeEntry:
    """A scheme: it decides which tensors train."""

    make: Callable[[Any], Any]  # `selection.schemes.SchemeContext` -> `selection.schemes.Scheme`
    label: str  # in figures
    trains: str  # text for docs/flags.md on which tensors it trains
    # Of one that always trains the same tensors: model, and `trained_layers` if it uses that -> bool [N] over
    # `model.trainable_variables`.
    mask: Callable[..., Any] | None = None
    is_elastic: bool = False  # it selects tensors within a time budget, which needs a timing table
    importance: str | None = None  # by which it selects
    uses: tuple[str, ...] = ()  # flags used only by the schemes that list them
    ignores: tuple[str, ...] = ()  # flags that have no effect on it
    excludes: tuple[str, ...] = ()  # flags that cannot be combined with it

    def takes(self, flag: str) -> bool:
        """Whether a flag of all schemes has an effect on this one."""
        return flag not in (*self.ignores, *self.excludes)


@dataclass(frozen=True)
class ImportanceEntry:
    """A measure of how much a tensor matters."""

    make: Callable[..., Any]  # task and batch size -> `selection.importance.ImportanceEvaluator`
    reads_images: bool = True  # it depends on the batches that it is measured on


@dataclass(frozen=True)
class DatasetEntry:
    """A data set of images."""

    read: Callable[..., Any]  # the flags of `uses` by name -> `datasets.sources.DataSource`
    class_names: Callable[..., Sequence[str]]  # `data_dir`, if it uses that -> their names, without reading images
    defaults: Mapping[str, Any] = field(default_factory=dict)  # that differ from `settings.PAPER`
    uses: tuple[str, ...] = ()  # flags used only by the data sets that list them
    is_tfds: bool = False  # it is one of tensorflow-datasets, which can be prepared
    is_folder: bool = False  # its images are the files in `data_dir`
    # `data_dir`, `test_fraction` -> about how many images there are to train on, if the batch depends on that.
    count_images: Callable[..., int] | None = None
    # As `datasets.image_folder.read_to_test`, if what a model was not trained on can test it.
    read_to_test: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Exporter:
    """A format of `--export`."""

    # Writes a trained model: it, `ImageData`, the run's folder, the origin of the model, and the seconds left before a
    # deadline -> a report for the user. If it `is_untrained`, it is written instead of training: the command, the
    # model, `ImageData`, and the timing table of a `TrainCommand` if its scheme has one -> a report.
    export: Callable[..., str]
    file: str  # the last one that it writes
    # Model -> what converting it once takes on this device now, so that a deadline leaves time for it.
    conversion_seconds: Callable[..., float] | None = None
    is_untrained: bool = False
    # `settings.RunSettings` -> raises `UserError`, before images are read, if nothing could be written.
    check: Callable[..., object] = lambda run: None


SCHEMES: Registry[SchemeEntry] = Registry("--train_type")
IMPORTANCES: Registry[ImportanceEntry] = Registry("importance")
DATASETS: Registry[DatasetEntry] = Registry("--dataset_name")
EXPORTERS: dict[str, Exporter] = {}
# What else extensions add to main.py: flags, checks of all options, and energy meters.
FLAGS: dict[str, Flag] = {}
CHECKS: list[Callable[[argparse.Namespace], None]] = []
METERS: list[Callable[[], Any]] = []
# What a flag of an extension asks for: another device's timing table, made of this one's, the value and the batch size.
RETIMED: dict[str, Callable[..., Any]] = {}


def users(registry: Registry[Any], flag: str) -> str:
    """Text with the names of the entries that use a flag."""
    return " or ".join(name for name, entry in registry.items() if flag in entry.uses)


def elastic(label: str, trains: str, importance: str | None = "gain", select: str | None = None) -> SchemeEntry:
    """Elastic training by an importance or without one; `select` is "module:name" of another Tensor Selector."""
    chosen = {"select": Lazy(select)} if select else {}
    make = Lazy("elastic_trainer.selection.elastic:elastic_scheme", importance=importance, **chosen)
    return SchemeEntry(make, label, trains, is_elastic=True, importance=importance)


def add_importance(name: str, entry: ImportanceEntry, label: str, trains: str) -> None:
    """Add an importance and the scheme elastic_training_<name>. Raises `ValueError` if they are registered already."""
    IMPORTANCES.add(name, entry)
    SCHEMES.add(f"elastic_training_{name}", elastic(label, trains, name))


# --- schemes and importances ------------------------------------------------------------------------------------------


def _add_fixed(name: str, mask: str, label: str, trains: str, maker: str = "fixed_scheme", **more: Any) -> None:
    make = Lazy(f"elastic_trainer.selection.schemes:{maker}", train_type=name)
    SCHEMES.add(name, SchemeEntry(make, label, trains, Lazy(f"elastic_trainer.networks.tensors:{mask}"), **more))


_IMPORTANCE = "elastic_trainer.selection.importance"

_add_fixed("full_training", "all_mask", "Full training", "every tensor")
_add_fixed("traditional_tl_training", "head_mask", "Traditional TL", "the head alone (transfer learning)")
_add_fixed(
    "closed_form_head",
    "head_mask",
    "Closed-form head",
    "the head, without gradients: a linear discriminant of the features below it, from one forward pass",
    "closed_form_scheme",
    ignores=("num_epochs", "max_steps", "learning_rate", "micro_batch", "average_head"),
)
_add_fixed(
    "bn_plus_bias_training",
    "normalisation_and_bias_mask",
    "BN+Bias",
    "scales and shifts of normalisation, biases, and the head",
)
_add_fixed(
    "last_layers_training",
    "last_layers_mask",
    "Last layers",
    "the last layers (paper, Fig 2)",
    uses=("trained_layers",),
)
IMPORTANCES.add("gain", ImportanceEntry(Lazy(f"{_IMPORTANCE}:ImportanceEvaluator")))
SCHEMES.add("elastic_training", elastic("ElasticTrainer", "tensors selected by importance"))
add_importance(
    "weight_magnitude",
    ImportanceEntry(Lazy(f"{_IMPORTANCE}:WeightMagnitude"), reads_images=False),
    "Weight magnitude",
    "tensors selected by the magnitude of weights (paper, Fig 20)",
)
add_importance(
    "grad_magnitude",
    ImportanceEntry(Lazy(f"{_IMPORTANCE}:GradientMagnitude")),
    "Gradient magnitude",
    "tensors selected by the magnitude of gradients (paper, Fig 20)",
)
add_importance(
    "random",
    ImportanceEntry(Lazy(f"{_IMPORTANCE}:Random")),
    "Random tensors",
    "tensors selected by random importances: a baseline",
)
SCHEMES.add(
    "elastic_training_upper_part",
    elastic(
        "Upper part",
        "all tensors from the output down to the deepest one within the time budget; importance is not measured",
        importance=None,
        select="elastic_trainer.selection.select:select_upper_part",
    ),
)

# --- data sets and exporters ------------------------------------------------------------------------------------------


def _add_tfds(name: str) -> None:
    read, names = (
        Lazy(f"elastic_trainer.datasets.sources:{task}", name=name) for task in ("read_tfds", "tfds_classes")
    )
    DATASETS.add(name, DatasetEntry(read, names, uses=("data_dir",), is_tfds=True))


_add_tfds("caltech_birds2011")  # the paper's data sets
_add_tfds("oxford_iiit_pet")
_add_tfds("stanford_dogs")
DATASETS.add(
    "digits",
    DatasetEntry(
        Lazy("elastic_trainer.datasets.sources:read_digits"),
        lambda: [str(digit) for digit in range(10)],
        {
            "model_name": "mobilenetv2",
            "input_size": 64,
            "batch_size": 16,
            "alpha": 0.35,
            "augment": "none",  # a mirrored digit is no digit
            "learning_rate": 2e-3,
            "num_epochs": 24,
            "interval": 12,
            "rho": 0.45,
            "feature_cache": "float32",
        },
    ),
)
DATASETS.add(
    "image_folder",
    DatasetEntry(
        Lazy("elastic_trainer.datasets.image_folder:read_image_folder"),
        Lazy("elastic_trainer.datasets.layout:folder_classes"),
        {
            "model_name": "mobilenetv2",
            "input_size": 160,
            "batch_size": 32,
            "alpha": 0.35,
            "num_epochs": 8,
            "interval": 8,
            "feature_cache": "float32",
            "save_model": True,
            "recipe": "robust",
        },
        ("data_dir", "test_fraction"),
        is_folder=True,
        count_images=Lazy("elastic_trainer.datasets.image_folder:count_training_images"),
        read_to_test=Lazy("elastic_trainer.datasets.image_folder:read_to_test"),
    ),
)
EXPORTERS["tflite"] = Exporter(
    Lazy("elastic_trainer.evaluation.export:export_tflite"),
    "export.json",
    Lazy("elastic_trainer.evaluation.export:conversion_seconds"),
)

# --- extensions -------------------------------------------------------------------------------------------------------

for _extension in pkgutil.iter_modules([str(Path(__file__).parent / "extensions")]):
    import_module(f"elastic_trainer.extensions.{_extension.name}")  # adds its entries, flags and checks
