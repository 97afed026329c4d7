"""A deadline: when steps must end, and the share of their time that has passed. Nothing is predicted.

The learning rate follows that share, so it reaches 0 where the steps end, however many there are. They end before the
deadline by what must follow them: averaging the head, a validation and the export, as long as each took when it was
last measured. All of them run before the first step, where the first model is made (`runs.run_log`).
"""

from __future__ import annotations

from elastic_trainer.runs.history import History

MARGIN = 1.5  # times what was measured last: a busy device takes longer the next time
LATEST = 3  # validations
SHARE = 0.01  # of the deadline, that ends before it in any case


class Deadline:
    """See the module's header.

    Args:
        seconds: after the start of the program.
        history: of the run.
        averages: whether the head is averaged after the last step.
        images: how many train, how many validate, and how many test the best model once, after training.
        later: seconds that the export takes.
    """

    def __init__(
        self, seconds: float, history: History, averages: bool, images: tuple[int, int, int], later: float = 0.0
    ) -> None:
        self.seconds, self._history, self._averages = seconds, history, averages
        self._images, self._later = images, later

    @property
    def end(self) -> float:
        """When the steps must end, in seconds after the start of the program."""
        history, (train, validating, testing) = self._history, self._images
        validation = max(history.validation_seconds[-LATEST:], default=0.0)
        a_pass = history.first_model_seconds  # over the images that train, if the head was fitted
        after = self._later + validation
        if self._averages and history.average_head_seconds is None:
            after += a_pass
        if testing:
            after += testing * (a_pass / train if history.starts_with_head else validation / max(validating, 1))
        return self.seconds * (1 - SHARE) - MARGIN * after

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
