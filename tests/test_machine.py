"""Available memory, peak memory of GPUs, and the commit, as a machine reports them."""

import subprocess
import sys
import types
from pathlib import Path

import pytest

import elastic_trainer
from elastic_trainer.system.errors import UserError
from elastic_trainer.system.machine import _commit, gpu_peak_memory_mb
from elastic_trainer.system.memory import free_memory_mb


def test_gpu_peak_memory_is_the_sum_of_the_allocators_peaks(monkeypatch):
    import tensorflow as tf

    gpus = [types.SimpleNamespace(name=f"/device:GPU:{k}") for k in range(2)]
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: gpus if kind == "GPU" else [])
    memory = {gpu.name: {"current": 1, "peak": 3_000_000 * (k + 1)} for k, gpu in enumerate(gpus)}
    monkeypatch.setattr(tf.config.experimental, "get_memory_info", memory.__getitem__)
    assert gpu_peak_memory_mb() == 9.0


@pytest.fixture
def system(tmp_path):
    """A root folder with proc: 1,000,000 kB available, 100,000 kB of swap, no control groups."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(
        "MemTotal:  4000000 kB\nMemFree:  5 kB\nMemAvailable:  1000000 kB\nSwapFree:  100000 kB\nHugePages_Total: 0\n"
    )
    return tmp_path


def write_group(folder, **files):
    """Write files of a control group; `__` in a name becomes a dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")
def test_peak_memory_is_not_that_of_the_program_that_started_this_one():
    program = "from elastic_trainer.system.memory import peak_memory_mb; print(peak_memory_mb())"
    start = f"subprocess.run([sys.executable, '-c', {program!r}])"
    parent = f"import subprocess, sys; large = bytearray(b'1') * 300_000_000; {start}"
    done = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, check=True)
    assert 0 < float(done.stdout) < 200


def test_available_memory_includes_swap(system):
    assert free_memory_mb(system) == pytest.approx(1024 + 102.4)


def test_available_memory_respects_all_parent_control_groups(system):
    unlimited = free_memory_mb(system)
    (system / "proc" / "self" / "cgroup").write_text("0::/box/run\n")
    base = system / "sys" / "fs" / "cgroup"
    write_group(base / "box" / "run", memory__max="max", memory__current=300_000_000)
    assert free_memory_mb(system) == unlimited
    write_group(base / "box", memory__max=500_000_000, memory__current=400_000_000)
    assert free_memory_mb(system) == pytest.approx(100 + 102.4)
    write_group(base / "box", memory__stat="anon 7\ninactive_file 40000000\nactive_file 10000000\nslab 9")
    assert free_memory_mb(system) == pytest.approx(150 + 102.4)
    write_group(base / "box" / "run", memory__max=10_000_000_000)
    assert free_memory_mb(system) == pytest.approx(150 + 102.4)
    write_group(base / "box", memory__max=100)
    assert free_memory_mb(system) == 0
    write_group(base / "box", memory__max=900_000_000_000)
    assert free_memory_mb(system) == unlimited
    write_group(
        base, memory__max=500_000_000, memory__current=450_000_000
    )  # inside a container, its group is the top one
    assert free_memory_mb(system) == pytest.approx(50 + 102.4)


def test_available_memory_respects_control_groups_of_version_1(system):
    (system / "proc" / "self" / "cgroup").write_text("5:cpu,cpuacct:/x\n4:memory:/box/run\n0::/\n")
    write_group(
        system / "sys" / "fs" / "cgroup" / "memory" / "box",
        memory__limit_in_bytes=300_000_000,
        memory__usage_in_bytes=200_000_000,
        memory__stat="cache 1\ntotal_inactive_file 5000000\ntotal_active_file 1000000",
    )
    assert free_memory_mb(system) == pytest.approx(106 + 102.4)


def test_available_memory_is_none_if_the_system_does_not_report_it(tmp_path):
    assert free_memory_mb(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 4000 kB\n")  # before Linux 3.14
    assert free_memory_mb(tmp_path) is None


def test_an_installed_package_does_not_report_the_commit_of_the_project_around_it(tmp_path):
    def git(*words):
        done = subprocess.run(["git", *words], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    files = [tmp_path / name for name in ("tracked.py", "installed.py")]
    for file in files:
        file.touch()
    git("init")
    git("add", "tracked.py")
    git("-c", "user.name=someone", "-c", "user.email=someone@example.org", "commit", "--message", "first")
    commit = git("rev-parse", "--short", "HEAD")
    assert [_commit(file) for file in (*files, tmp_path.parent / "none.py")] == [commit, None, None]


def test_a_name_that_needs_tensorflow_is_refused_where_keras_computes_in_another_backend(monkeypatch):
    monkeypatch.setattr("keras.config.backend", lambda: "torch")
    with pytest.raises(UserError, match=r"Keras computes in torch, and .* needs TensorFlow: set KERAS_BACKEND=tensorf"):
        vars(elastic_trainer)["__getattr__"]("Trainer")


def test_a_callback_where_the_user_has_no_home_folder_gets_a_temporary_one_in_one_line(monkeypatch, capsys):
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    vars(elastic_trainer)["__getattr__"]("ElasticTraining")
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"no home folder: downloads and caches go to {Path.home()}; ") and Path.home().is_dir()
    Path.home().rmdir()
