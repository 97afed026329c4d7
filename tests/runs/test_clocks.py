"""Seconds and joules by what they were spent on."""

import json

from elastic_trainer.runs.clocks import Clocks


def test_energy_is_counted_only_during_training():
    clocks, total = Clocks(), [0.0]
    clocks.meter = lambda: total[0]
    for spent in (1, 2):
        with clocks.running("training"):
            total[0] += spent
            with clocks.running("selection"):
                total[0] += 10  # part of training
            with clocks.paused("training"):
                total[0] += 100
        with clocks.running("validation"), clocks.paused("training"):
            total[0] += 1000
    assert clocks.joules == 1 + 2 + 2 * 10
    assert len(clocks.spans) == 4 and all(begin <= end for begin, end in clocks.spans)
    again = Clocks(**json.loads(json.dumps(clocks.to_record())))
    assert again.joules == 23 and len(again.spans) == 4
    with again.running("training"):  # gone on with where there is no meter
        pass
    assert again.joules is None
