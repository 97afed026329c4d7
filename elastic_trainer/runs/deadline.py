"""A deadline: when steps must end, and the share of their time that has passed. Nothing is predicted.

The learning rate follows that share, so it reaches 0 where the steps end, however many there are. They end before the
deadline by what must follow them: averaging the head, a validation and the export, as long as each took when it was
last measured. All of them run before the first step, where the first model is made (`runs.run_log`). Computing features
counts only for those that are not kept yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_trainer.runs.history import History

if TYPE_CHECKING:
    from elastic_trainer.runs.engine import Engine

MARGIN = 1.5  # times what was measured last: a busy device takes longer the next time
LATEST = 3  # validations
SHARE = 0.01  # of the deadline, that ends before it in any case


class Deadline:
    """See the module's header.

    Args:
        seconds: after the start of the program.
        engine: what trains until then.
    """

    def __init__(self, seconds: float, engine: Engine) -> None:
        self.seconds, self._engine, self._data = seconds, engine, engine.data

    @property
    def _history(self) -> History:
        return self._engine.history

    @property
    def end(self) -> float:
        """When the steps must end, in seconds after the start of the program."""
        history, data, training = self._history, self._data, self._engine.training
        after = self.validation_seconds
        if self._engine.averages_later:  # over all training images
            made = 0.0 if self._drops_features else 1.0 - training.features.missing_share
            after += history.first_model_seconds - made * history.first_feature_seconds
        after += data.tested_later * self._test_seconds
        kept = data.export_seconds + data.tested_later * data.reading_seconds
        return self.seconds * (1 - SHARE) - kept - MARGIN * after

    @property
    def validation_seconds(self) -> float:
        """Of the last validation."""
        seconds, training = max(self._history.validation_seconds[-LATEST:], default=0.0), self._engine.training
        is_made = training.evaluation.has_features and not self._drops_features
        return seconds + (0.0 if is_made else self._history.test_feature_seconds)

    @property
    def _drops_features(self) -> bool:
        """Whether averaging the head will: where memory has a limit, all of them (`TrainState.average_head`)."""
        return self._engine.averages_later and self._engine.training.memory.has_limit

    @property
    def _test_seconds(self) -> float:
        """Of an image that tests after training, once it is read."""
        history, data = self._history, self._data
        if history.starts_with_head:
            return history.first_model_seconds / data.train_count
        whole = max(history.validation_seconds[-LATEST:], default=0.0) + history.test_feature_seconds
        return whole / max(data.test_count, 1)

    def fitting_tests(self) -> int:
        """How many of the images that test after training there is time for now."""
        data = self._data
        left = self.seconds - self._history.clocks.elapsed() - data.export_seconds
        each = max(data.reading_seconds + self._test_seconds, 1e-6)
        return min(int(max(left, 0.0) / each), data.tested_later)

    @property
    def share(self) -> float:
        """The share of the time of steps that has passed, from the first one on."""
        start = self._history.first_step_seconds
        if start is None:
            return 0.0
        now = self._history.clocks.elapsed()
        return min((now - start) / max(self.end - start, 1e-3), 1.0)

    def is_over(self, later: float = 0.0) -> bool:
        """Whether there is no time for another step `later` seconds from now."""
        history = self._history
        step_ms = history.selection.step_ms[-LATEST:] if history.selections else []
        return history.clocks.elapsed() + later + max(step_ms, default=0.0) / 1e3 >= self.end
