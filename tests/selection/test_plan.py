"""The plan for another board."""

import numpy as np
from conftest import make_table

from elastic_trainer.networks.tensors import head_mask
from elastic_trainer.selection.plan import PLANNED_RHOS, plan_lines


def test_plan_fits_each_rho_and_marks_infeasible_ones(small_model):
    head = head_mask(small_model)
    table = make_table(small_model, constant_ms=2.0, t_fw_ms=2.0)
    lines = list(plan_lines(table, head, np.ones(len(head))))
    assert len(lines) == 2 + len(PLANNED_RHOS)
    found = {}
    for form, misses in enumerate((1.0, 0.0)):
        smallest = table.predict_ms(head, misses) / table.full_step_ms
        for line in lines[2:]:
            rho, entry = float(line[:4]), line[6 + 36 * form :][:34]
            found[form, rho] = entry.strip()
            assert (entry.strip() == "not feasible") == (rho < smallest)
            if rho >= smallest:
                step_ms, unit, over_full, tensors, *_ = entry.split()
                assert unit == "ms" and float(over_full) <= rho + 5e-4 and int(tensors) >= head.sum()
                assert abs(float(step_ms) / table.full_step_ms - float(over_full)) < 2e-3
    assert found[0, 0.35] == "not feasible" != found[1, 0.35]
    assert found[1, 0.1] == "not feasible" != found[0, 0.7]
