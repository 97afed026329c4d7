"""How much room on the disk a run takes, said and checked before it trains."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from elastic_trainer.errors import UserError
from elastic_trainer.files import existing_parent
from elastic_trainer.memory.step_memory import variables_mb
from elastic_trainer.settings import OPTIMIZERS, NetworkSettings

if TYPE_CHECKING:
    import keras

CHECKPOINTS = 3  # two are kept, and the next one is written before the older of them goes
MODELS = 3  # the best one and the last, and what takes the place of one of them
EXPORTED = 2  # of the model: in float32, and with rounded weights


class DiskNeed(NamedTuple):
    """What a run folder takes at most, in MB, tables and curves aside.

    Attributes:
        checkpoint_mb: one checkpoint.
        models_mb: all saved and exported models.
    """

    checkpoint_mb: float
    models_mb: float

    @property
    def megabytes(self) -> float:
        """All of it, at the moment when a checkpoint is written."""
        return CHECKPOINTS * self.checkpoint_mb + self.models_mb


def disk_need(model: keras.Model, network: NetworkSettings, saves_model: bool, exports: bool) -> DiskNeed:
    """What a run of `model` writes, by the sizes of variables.

    Args:
        model, network: what is trained.
        saves_model, exports: whether the models are saved, and the best one is exported.
    """
    model_mb, trained_mb = variables_mb(model.variables), variables_mb(model.trainable_variables)
    models_mb = model_mb * (MODELS * saves_model + EXPORTED * exports)
    return DiskNeed(model_mb + OPTIMIZERS[network.optimizer] * trained_mb, models_mb)


def disk_line(need: DiskNeed, logdir: Path, earlier: Path | None = None) -> str:
    """That need, and what is free, in words.

    Args:
        need: of the run.
        logdir: on the disk that is asked.
        earlier: folder of a run whose files are replaced, so they count as free.

    Raises:
        UserError: not even one checkpoint and the models fit.
    """
    written = [path for path in earlier.glob("**/*") if path.is_file()] if earlier is not None else []
    earlier_mb = sum(path.stat().st_size for path in written) / 1e6
    free_mb = shutil.disk_usage(existing_parent(logdir)).free / 1e6
    least_mb = need.checkpoint_mb + need.models_mb
    if least_mb > free_mb + earlier_mb:
        raise UserError(
            f"--logdir {logdir}: the run takes about {least_mb:,.0f} MB (checkpoint {need.checkpoint_mb:,.0f}, models "
            f"{need.models_mb:,.0f}), and {free_mb:,.0f} MB are free; give a --logdir on another disk, or free some"
        )
    return (
        f"disk: the run folder takes at most about {need.megabytes:,.0f} MB ({CHECKPOINTS} checkpoints of "
        f"{need.checkpoint_mb:,.1f}, models {need.models_mb:,.1f}), {free_mb:,.0f} MB are free in {logdir}"
    )
