"""The clocks of a run: energy counts during training only."""

import json

from elastic_trainer.runs.history import Clocks


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
    assert len(clocks.spans) == 4 and all(start <= end for start, end in clocks.spans)
    restored = Clocks(**json.loads(json.dumps(clocks.to_record())))
    assert restored.joules == 23 and len(restored.spans) == 4
    with restored.running("training"):  # resumed on a machine without a meter
        pass
    assert restored.joules is None
