#!/usr/bin/env python
"""Run Keras' own tests of callbacks with `ElasticTraining` as the first callback of every `fit`.

    python scripts/tools/try_keras_tests.py ../keras

The folder is a checkout of Keras, of the tag that is nearest to the installed version, whose code the tests run. They
run in four ways, each in a process of its own: `plain` without ElasticTraining; `as users get it` with
`ElasticTraining(rho=1.0)`, which leaves `fit` alone; `told` with the same and a scheme, so that every step is its own;
`decided` with rho 0.5 and a decision to train the upper part after the first step, however short the fit is.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import keras
import pytest

import utils
from elastic_trainer import ElasticTraining
from elastic_trainer.selection.payoff import Decision, Payoff
from elastic_trainer.settings.flags import OneLineParser
from elastic_trainer.system.errors import UserError

TESTS = (
    *("early_stopping", "model_checkpoint", "backup_and_restore", "swap_ema_weights", "reduce_lr_on_plateau"),
    *("learning_rate_scheduler", "tensorboard", "terminate_on_nan", "csv_logger"),
)
WAYS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "as users get it": {"rho": 1.0},
    "told": {"rho": 1.0, "scheme": "elastic_training_upper_part"},
    "decided": {"rho": 0.5},
}


class Outcomes:
    """A plugin of pytest that counts what tests did, and keeps why they failed.

    Attributes:
        counts: tests by outcome.
        failed: the first line of the error of each failed test, by its name.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.failed: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self.counts[report.outcome] += 1
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            why = crash.message if crash else str(report.longrepr)
            self.failed[report.nodeid.partition("::")[2]] = why.partition("\n")[0]


def with_elastic_training(settings: dict[str, Any], elastic: Counter[str]) -> None:
    """Make `ElasticTraining` of these settings the first callback of every `fit` from now on; counts what it does."""
    fit = keras.Model.fit

    def elastic_fit(model: keras.Model, *args: Any, callbacks: Any = None, **more: Any) -> Any:
        callback = ElasticTraining(**settings)
        elastic["fits"] += 1
        others = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks] if callbacks is not None else []
        try:
            return fit(model, *args, callbacks=[callback, *others], **more)
        finally:
            with contextlib.suppress(UserError):  # there is none where no step was elastic
                elastic["elastic fits"] += callback.history is not None

    keras.Model.fit = elastic_fit
    record_call = Payoff.record_call

    def recorded_twice(payoff: Payoff, call_ms: float, steps: int = 1) -> bool:
        record_call(payoff, call_ms, steps)  # else the first call, which compiles, gives no time
        return record_call(payoff, call_ms, steps) or True

    Payoff.record_call = recorded_twice  # type: ignore
    Payoff.decide = lambda *_: Decision(True, "decided at once")  # type: ignore[method-assign]


def run_tests(folder: str, settings: dict[str, Any] | None) -> tuple[Counter[str], dict[str, str]]:
    """How many tests in `folder` passed and failed, of how many fits; and why tests failed, by name."""
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    outcomes, elastic = Outcomes(), Counter[str]()
    os.chdir(folder)
    if settings is not None:
        with_elastic_training(settings, elastic)
    pytest.main(["-q", "-p", "no:cacheprovider", "-W", "ignore", folder], plugins=[outcomes])
    return outcomes.counts + elastic, outcomes.failed


def main() -> None:
    parser = OneLineParser(prog="try_keras_tests.py", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, metavar="DIR", help="a checkout of Keras")
    parser.add_argument("--only", nargs="+", default=TESTS, metavar="NAME", help="files of tests; default: %(default)s")
    args = parser.parse_args()
    paths = [args.folder / f"keras/src/callbacks/{name}_test.py" for name in args.only]
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path}: there is no such file; give the folder of a checkout of Keras")
    print(f"Keras {keras.__version__}\n\n| way | passed | failed | fits | elastic |\n|---|---|---|---|---|", flush=True)
    reasons = []
    for way, settings in WAYS.items():
        with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("fork").Pool(1) as pool:
            for path in paths:
                shutil.copy(path, folder)
            counts, failed = pool.apply(run_tests, (folder, settings))
        cells = (counts[name] for name in ("passed", "failed", "fits", "elastic fits"))
        print(f"| {way} | {' | '.join(map(str, cells))} |", flush=True)
        reasons += [f"- {way}: {name}: {why}" for name, why in failed.items()]
    print("", *reasons, sep="\n")


if __name__ == "__main__":
    utils.run_cli(main)
