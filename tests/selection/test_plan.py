"""The plan for another board."""

import numpy as np
from conftest import make_table

from elastic_trainer.networks.tensors import head_mask
from elastic_trainer.selection.plan import plan_lines


def test_plan_fits_each_rho_and_marks_infeasible_ones(small_model):
    head = head_mask(small_model)
    table = make_table(small_model, constant_ms=20.0)
    lines = list(plan_lines(table, head, np.ones(len(head))))
    assert len(lines) == 1 + 8
    smallest = table.predict_ms(head) / table.full_step_ms
    for line in lines[1:]:
        rho, feasible, *rest = line.split()
        assert feasible == ("yes" if float(rho) >= smallest else "no")
        if rest:
            assert float(rest[2]) <= float(rho) and int(rest[3]) >= head.sum()
    assert {line.split()[1] for line in lines[1:]} == {"yes", "no"}
