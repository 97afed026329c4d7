"""Elastic training inside `model.fit`: one line in a Keras program.

    freeze_batch_norm(model)
    model.compile(optimizer, loss, metrics=metrics)
    model.fit(x, y, epochs=12, callbacks=[ElasticTraining(rho=0.5)])

Keras looks `model.train_function` up at every step, so a callback may set it. Keras keeps the loop, the data, the
metrics and all other callbacks; `Engine.step` takes its place for what happens in a step (`runs.keras_fit`).
"""

from __future__ import annotations

import argparse
from typing import Any

import keras

from elastic_trainer.runs.history import History
from elastic_trainer.runs.keras_fit import Fit
from elastic_trainer.selection.named import SCHEMES
from elastic_trainer.selection.payoff import ALONE, Phase
from elastic_trainer.settings import Settings
from elastic_trainer.settings.flags import memory_size
from elastic_trainer.system.errors import UserError, not_one_of
from elastic_trainer.timing.table import TimingTable

UPPER_PART, IMPORTANCE = "elastic_training_upper_part", "elastic_training"


class ElasticTraining(keras.callbacks.Callback):
    """Trains, in steps of `model.fit`, only the tensors that fit into a time budget (paper sections 4 and 5).

    The model's own optimizer, loss, metrics and learning-rate schedule are used. Works with NumPy arrays, tf.data and
    PyDataset, class and sample weights, validation, and other callbacks.

    With `rho` alone it decides when that pays, and says so: everything trains as in plain `fit`, in Keras' own step,
    while that step is timed. From the tenth step on, a network whose weights are pretrained trains only the upper part
    that fits the budget; any other one does so once everything has trained until the loss settles; and where what is
    left of `fit` is too short to win back the cost, it is left alone. With `scheme`, `interval`, `table` or `memory` it
    trains elastically from the first step, as told.

    Not possible here: cached features, since `fit` does not say which examples come next (`Trainer` has them); models
    with their own `train_step` or several optimizers; more than one replica; XLA (`jit_compile` has no effect). Other
    callbacks must not change weights within an epoch, since frozen batch norms are folded into kernels that do not
    train. Keras' Adam counts steps for all tensors together, so a tensor that is first selected late starts with
    larger updates than at the start.

    Args:
        rho: time of a step over that of one of plain `fit`, above 0 and at most 1. Where it does not decide by itself,
            over that of a full step here, which is at most as long.
        interval: epochs between two selections; fractions are allowed where the length of an epoch is known. By
            default as many as keep selections short beside what they save; an upper part is selected once.
        table: what each tensor costs (`elastic_trainer.profile` measures it). By default it follows from FLOPs and
            bytes, and from the steps of this fit.
        scheme: an elastic one of `selection.named.SCHEMES`, by default "elastic_training" where it does not decide by
            itself; `elastic_training_upper_part` needs no importance.
        memory: what the process may take in all, resident: `900M`, `1.5G`, `80%` of what is available now, or a
            number of MB. Selections keep within it, beside `rho`; by default there is no limit.
        importance_batches: latest batches that importance is measured on.
        deterministic: do not correct the budget by how fast the device is while training.
        verbose: 1 prints a line for each selection and one at the end, 0 nothing.

    Attributes:
        history: of the latest `fit`: selections, step times in ms, slowdowns.
        rho_measured: time of a step over that of plain `fit`, waiting for data and what Keras does in between included;
            None before it is known, and where the fit was left alone or has a limit of memory.

    Raises:
        UserError: an argument is out of range. In `fit`: the model is not compiled, a batch norm is not frozen, or
            `rho` or `memory` is too small.
    """

    def __init__(
        self,
        rho: float = 0.5,
        interval: float | None = None,
        table: TimingTable | None = None,
        *,
        scheme: str | None = None,
        memory: str | float | None = None,
        importance_batches: int = 1,
        deterministic: bool = False,
        verbose: int = 1,
    ) -> None:
        super().__init__()
        if not 0 < rho <= 1:
            raise UserError(f"rho {rho:g}: must be above 0 and at most 1")
        if interval is not None and not interval > 0:
            raise UserError(f"interval {interval:g}: must be above 0")
        elastic = [name for name in SCHEMES if SCHEMES[name].is_elastic]
        if scheme is not None and scheme not in elastic:
            raise UserError(f"scheme {not_one_of(scheme, elastic)}")
        self.decides = scheme is None and interval is None and table is None and memory is None
        self.scheme, self.table, self.verbose = UPPER_PART if self.decides else scheme or IMPORTANCE, table, verbose
        self.settings = Settings(
            rho=rho,
            memory=_megabytes(memory),
            interval=interval,  # type: ignore[arg-type]  # None: one selection, until the first has shown what it takes
            importance_batches=importance_batches,
            deterministic=deterministic,
            feature_cache="off",
        )
        self._fit: Fit | None = None  # the latest one, from its first step on
        self.keras_function: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """The callback before its first `fit`, for pickles and copies (Keras Tuner makes one for each trial)."""
        return {**vars(self), "_model": None, "_fit": None, "keras_function": None}

    @property
    def history(self) -> History:
        """Of the latest `fit`. Raises `UserError` before its first elastic step."""
        if self._fit is None or self._fit.elastic is None:
            raise UserError("ElasticTraining has no history before it has trained a step in model.fit")
        return self._fit.elastic.engine.history

    @property
    def rho_measured(self) -> float | None:
        """See the class."""
        return None if self._fit is None else self._fit.share

    # --- hooks of Keras ---------------------------------------------------------------------------------------------

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        function = self.model.train_function
        while isinstance(getattr(function, "__self__", None), ElasticTraining):  # left behind by a fit that was stopped
            function = function.__self__.keras_function
        self.keras_function, self._is_called, self._fit = function, False, None
        if self.decides and self.settings.rho == 1:
            self.say(f"rho 1 trains everything; {ALONE}")
            return
        if self.model.distribute_strategy.num_replicas_in_sync > 1:
            raise UserError("ElasticTraining trains on one replica; leave out the distribution strategy")
        self.model.train_function = self._train_function

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch
        if self._fit is not None:
            self._fit.begin_epoch(epoch)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._is_called = True
        is_elastic = self._fit is not None and self._fit.elastic is not None and self._fit.phase is not Phase.LEFT
        if is_elastic and self.model.train_function != self._train_function:
            raise UserError("the model was compiled again during fit, without ElasticTraining; compile it before fit")

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self._fit is not None:  # else it is not a fit that tests
            self._fit.end_steps()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._fit is not None:
            self._fit.end_epoch(epoch, logs or {})

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if self.model.train_function == self._train_function:
            self.model.train_function = self.keras_function
        if self._fit is not None:
            self._fit.end()

    def _train_function(self, iterator: Any) -> dict[str, Any]:
        """Train as many batches as Keras asks for at once; returns the running results of its metrics.

        Calls of others, such as of `train_on_batch` in a callback, or of a later fit without this one, are Keras' own.
        """
        is_called, self._is_called = self._is_called, False
        if is_called:
            self._fit = self._fit or Fit(self, iterator.element_spec, self._epoch)
            return self._fit.train(iterator)
        if self._fit is not None:
            self._fit.mark_stale()
        results: dict[str, Any] = self.keras_function(iterator)
        return results

    def say(self, text: str) -> None:
        """Print a line between Keras' lines."""
        if self.verbose:
            print(f"\nElasticTraining: {text}")


def _megabytes(memory: str | float | None) -> float | None:
    """MB of a limit as `ElasticTraining` takes it. Raises `UserError` if it is none."""
    try:
        return None if memory is None else memory_size(memory if isinstance(memory, str) else f"{memory}M")
    except argparse.ArgumentTypeError as error:
        raise UserError(f"memory {memory!r}: {error}") from error
