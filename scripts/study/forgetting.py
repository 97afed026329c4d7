#!/usr/bin/env python
"""What a network still knows of the first half of the classes after it was trained on the second.

The parts `first_half` and `second_half` of run_study.py train them one after the other, the second with a new head.
Here the first half's own head is put on the network that the second half left, and tested on the images of the first.

    python scripts/study/forgetting.py --data grocery --seeds 3
"""

from __future__ import annotations

import argparse
from pathlib import Path

from run_study import add_shared_flags
from study_runs import PARTS
from tqdm import tqdm

import utils
from elastic_trainer.cli.evaluate_command import parse_evaluation
from elastic_trainer.cli.parser import OneLineParser
from elastic_trainer.errors import UserError
from elastic_trainer.files import write_csv
from elastic_trainer.machine import load_tensorflow
from elastic_trainer.runs.reader import is_finished, read_summary

COLUMNS = ("setting", "seed", "first_before", "first_after", "second", "train_seconds")


def accuracies_on_first(first: Path, second: Path) -> tuple[float, float]:
    """Accuracies on the images of the run folder `first`, 0…1: of its best model, and with the layers of `second`'s."""
    from elastic_trainer.evaluation.predictions import predict
    from elastic_trainer.networks.pretrained import load
    from main import load_to_evaluate

    model, images = load_to_evaluate(parse_evaluation(["--evaluate", str(first)]))
    before = predict(model, images).accuracy
    load(model, model, second, "the network of the first half")  # all but the head, which fits other classes
    return before, predict(model, images).accuracy


def main() -> None:
    parser = OneLineParser(
        prog="forgetting.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_shared_flags(parser)
    args = parser.parse_args()
    firsts = {run.name: run.folder(args.logdir) for run in PARTS["first_half"](args.data, args.seeds)}
    runs = [run for run in PARTS["second_half"](args.data, args.seeds) if is_finished(run.folder(args.logdir))]
    if not runs:
        raise UserError(
            f"--logdir {args.logdir}: holds no run of the part second_half; make them with run_study.py second_half"
        )
    load_tensorflow()
    rows = []
    for run in tqdm(runs, unit="run"):
        assert run.after is not None, "a run of the second half comes after one of the first"
        before, after = accuracies_on_first(firsts[run.after], run.folder(args.logdir))
        summary = read_summary(run.folder(args.logdir))
        rows.append([run.label, run.seed, before, after, summary["best_accuracy"], summary["train_seconds"]])
    write_csv(args.results / f"forgetting_{args.data}.csv", COLUMNS, rows)


if __name__ == "__main__":
    utils.run_cli(main)
