"""The plan for another board."""

from conftest import make_table

from elastic_trainer.networks.tensors import head_mask
from elastic_trainer.selection.plan import PLANNED_RHOS, plan_lines


def test_plan_fits_each_rho_and_marks_infeasible_ones(small_model):
    head = head_mask(small_model)
    table = make_table(small_model, constant_ms=2.0, t_fw_ms=2.0)
    _, *lines = plan_lines(table, head)
    smallest = table.predict_ms(head) / table.full_step_ms
    assert len(lines) == len(PLANNED_RHOS) and PLANNED_RHOS[0] < smallest < PLANNED_RHOS[-1]
    for line in lines:
        rho, row = float(line[:4]), line[4:].split()
        assert (row == ["not", "feasible"]) == (rho < smallest)
        if rho >= smallest:
            step_ms, unit, over_full, tensors, *_ = row
            assert unit == "ms" and float(over_full) <= rho + 5e-4 and int(tensors) >= head.sum()
            assert abs(float(step_ms) / table.full_step_ms - float(over_full)) < 2e-3
