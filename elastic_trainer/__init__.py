"""ElasticTrainer as a library: fine-tune a Keras network in the time you choose.

The names of `__all__` are what other programs use; each is imported when it is first asked for, since TensorFlow takes
seconds to import. `import elastic_trainer` alone does not import it.
"""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for type checkers and editors: the names of `_MODULES`
    from elastic_trainer.datasets.batches import ArrayData as ArrayData
    from elastic_trainer.datasets.decoding import read_photo as read_photo
    from elastic_trainer.engine.feature_sums import FeatureSums as FeatureSums
    from elastic_trainer.keras_callback import ElasticTraining as ElasticTraining
    from elastic_trainer.networks.batch_norm import freeze_batch_norm as freeze_batch_norm
    from elastic_trainer.profiling.profile import profile as profile
    from elastic_trainer.runs.checkpoint import State as State
    from elastic_trainer.runs.trainer import Trainer as Trainer
    from elastic_trainer.settings import Settings as Settings
    from elastic_trainer.system.errors import UserError as UserError

# Public name -> the module that has it.
_MODULES = {
    "ArrayData": "elastic_trainer.datasets.batches",
    "ElasticTraining": "elastic_trainer.keras_callback",
    "FeatureSums": "elastic_trainer.engine.feature_sums",
    "Settings": "elastic_trainer.settings",
    "State": "elastic_trainer.runs.checkpoint",
    "Trainer": "elastic_trainer.runs.trainer",
    "UserError": "elastic_trainer.system.errors",
    "freeze_batch_norm": "elastic_trainer.networks.batch_norm",
    "profile": "elastic_trainer.profiling.profile",
    "read_photo": "elastic_trainer.datasets.decoding",
}

__all__ = [*_MODULES, "__version__"]  # noqa: PLE0604
_KERAS = ("ElasticTraining", "Trainer", "freeze_batch_norm", "profile")  # need it with TensorFlow

try:
    __version__ = metadata.version("elastic-trainer")
except metadata.PackageNotFoundError:  # run from a checkout: the version of pyproject.toml
    __version__ = "0.1.0"

if not TYPE_CHECKING:  # a type checker would accept every name

    def __getattr__(name):
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name in _KERAS:
            from elastic_trainer.system.machine import check_keras

            check_keras()
        value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
        return value

    def __dir__():
        return sorted({*globals(), *_MODULES})
