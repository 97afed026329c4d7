"""What a run takes on the disk: estimated, compared with what it writes, and refused where it cannot fit."""

from types import SimpleNamespace

import numpy as np
import pytest

from elastic_trainer.errors import UserError
from elastic_trainer.networks.saved_model import save_model
from elastic_trainer.runs import folder
from elastic_trainer.runs.checkpoint import Checkpoints, State
from elastic_trainer.runs.folder import DiskNeed, disk_line, disk_need
from elastic_trainer.settings import OPTIMIZERS, NetworkSettings
from elastic_trainer.timing.measuring import idle_optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_checkpoint_has_the_variables_of_the_network_and_the_optimizer(name, tmp_path):
    import models

    model = models.build_model("mobilenetv2", 32, 10, alpha=0.35)
    optimizer = idle_optimizer(model, name)
    arrays = {str(k): variable.numpy() for k, variable in enumerate([*model.variables, *optimizer.variables])}
    Checkpoints(tmp_path).save(1, State(arrays, {}))
    [path] = tmp_path.glob("*.npz")
    need = disk_need(model, NetworkSettings(optimizer=name), saves_model=False, exports=False)
    assert need.models_mb == 0
    assert need.checkpoint_mb == pytest.approx(sum(np.asarray(one).nbytes for one in arrays.values()) / 1e6, rel=0.01)
    assert need.checkpoint_mb == pytest.approx(path.stat().st_size / 1e6, rel=0.1)
    save_model(model, tmp_path / "last.keras")
    saved = disk_need(model, NetworkSettings(optimizer=name), saves_model=True, exports=False).models_mb
    assert saved == pytest.approx(folder.MODELS * (tmp_path / "last.keras").stat().st_size / 1e6, rel=0.4)


def test_what_cannot_fit_is_refused_in_one_line_and_what_is_replaced_counts_as_free(tmp_path, monkeypatch):
    monkeypatch.setattr(folder.shutil, "disk_usage", lambda path: SimpleNamespace(free=100e6))
    logdir = tmp_path / "not" / "yet"
    assert disk_line(DiskNeed(20.0, 30.0), logdir).startswith("disk: the run folder takes at most about 90 MB (3 check")
    assert "100 MB are free" in disk_line(DiskNeed(60.0, 39.0), logdir), "one checkpoint fits"
    too_much = DiskNeed(60.0, 41.0)
    with pytest.raises(UserError, match=r"^--logdir .* takes about 101 MB .* and 100 MB are free; give a") as error:
        disk_line(too_much, logdir)
    assert "\n" not in str(error.value)
    (tmp_path / "earlier").mkdir()
    (tmp_path / "earlier" / "best.keras").write_bytes(bytes(2_000_000))
    assert disk_line(too_much, logdir, tmp_path / "earlier")
