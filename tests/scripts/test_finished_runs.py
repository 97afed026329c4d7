"""What figures read of finished runs: damaged files are one line that names them."""

import re

import pytest
from finished_runs import read_run
from made_up_runs import made_up_run

from elastic_trainer.runs.reader import read_config, read_summary
from elastic_trainer.system.errors import UserError


@pytest.mark.parametrize("content", ["", '{"version', "null", "[1]", b"\xff", "{}", '{"version": 0}'], ids=repr)
def test_a_damaged_file_of_a_run_and_one_of_another_version_is_one_line_that_names_it(content, tmp_path):
    for kind, read in (("config", read_config), ("summary", read_summary)):
        folder = made_up_run(tmp_path / kind)
        path = folder / f"{kind}.json"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(UserError, match=f"^{re.escape(str(path))}: is damaged or of another version; delete it$"):
            read(folder)
        with pytest.raises(UserError, match=f"{folder}: contains no finished run"):
            read_run(folder)


def test_the_model_before_training_is_no_epoch_of_a_run(tmp_path):
    folder = made_up_run(tmp_path / "run")
    header, *rows = (folder / "metrics.csv").read_text().splitlines()
    first = ["0" if name in ("epoch", "train_seconds") else "" for name in header.split(",")]
    (folder / "metrics.csv").write_text("\n".join([header, ",".join(first), *rows]))
    assert [row["epoch"] for row in read_run(folder).epochs] == ["1", "2", "3", "4"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"epoch,name,importance,chosen\n0,a,1,1\n0,b,2,0\n1,a,1,1\n",
        b"epoch,name,importance,chosen\n0,a,much,1\n",
        b"name,importance,chosen\na,1,1\n",
        b"\xff\xfe",
    ],
)
def test_damaged_selections_are_one_line(content, tmp_path):
    damaged = made_up_run(tmp_path / "damaged")
    (damaged / "selections.csv").write_bytes(content)
    with pytest.raises(UserError, match=r"selections\.csv: is damaged or of another version; delete it"):
        read_run(damaged).selections()
