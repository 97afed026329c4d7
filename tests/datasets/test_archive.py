"""data.py prepare, pack and unpack: a data set arrives on another machine unchanged, or not at all."""

import contextlib
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from command_line import ROOT, run_data
from hypothesis import given, settings
from hypothesis import strategies as st
from small_images import pairs, write_photos
from small_tfds import TFDS_CLASSES, prepare_small

import data
from elastic_trainer.errors import UserError


@pytest.fixture
def photos(tmp_path):
    return write_photos(tmp_path / "photos")


@pytest.mark.parametrize("name", ["caltech_birds2011", "stanford_dogs"])
def test_prepare_pack_unpack_gives_the_same_batches_elsewhere(name, tmp_path, monkeypatch, capsys):
    here, there = tmp_path / "here", tmp_path / "there"
    prepare_small(name, here, monkeypatch)
    run_data("prepare", "--dataset_name", name, "--data_dir", here)
    assert re.search(rf"{name} is ready in .*: 8 train, 5 test", capsys.readouterr().out)
    run_data("pack", "--dataset_name", name, "--data_dir", here, "--output", tmp_path / "it.tar")
    run_data("unpack", tmp_path / "it.tar", "--data_dir", there)
    assert f"--dataset_name {name} --data_dir {there}" in capsys.readouterr().out
    first, second = (data.load(name, 16, 4, data_dir=place) for place in (here, there))
    assert second.class_names == first.class_names and len(first.class_names) == TFDS_CLASSES[name]
    for (one, labels), (other, same) in zip(pairs(first.train(0)), pairs(second.train(0)), strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(labels, same)
    with pytest.raises(UserError, match=rf"--data_dir .*there: .*/{name} exists already"):
        run_data("unpack", tmp_path / "it.tar", "--data_dir", there)


def test_pack_unpack_copies_photos_byte_for_byte(photos, tmp_path, capsys):
    run_data("pack", "--dataset_name", "image_folder", "--data_dir", photos, "--output", tmp_path / "p.tar")
    assert "unpack p.tar --data_dir DIR" in capsys.readouterr().out
    run_data("unpack", tmp_path / "p.tar", "--data_dir", tmp_path / "there")
    assert f"--dataset_name image_folder --data_dir {tmp_path}/there/photos" in capsys.readouterr().out
    files = {path.relative_to(photos): path.read_bytes() for path in photos.rglob("*") if path.is_file()}
    copied = tmp_path / "there" / "photos"
    assert files == {path.relative_to(copied): path.read_bytes() for path in copied.rglob("*") if path.is_file()}


@dataclass(frozen=True)
class Entry:
    """What to make in a folder of photos: what kind of entry, and the bytes of its name."""

    kind: str
    name: bytes


REFUSED = ("link to nothing", "link to the folder it lies in", "pipe")
KINDS = ("file", "hard link", "link to a file", "folder", "empty folder", "link to a folder", *REFUSED)
NAMES = st.binary(min_size=1, max_size=12) | st.text("a. $\\\"'\r\n\t\x0c\x1c\x85\u2028é", min_size=1, max_size=6).map(
    str.encode
)
ENTRIES = st.builds(
    Entry, st.sampled_from(KINDS), NAMES.filter(lambda name: not {*b"/\0"} & {*name} and name.strip(b".") != b"")
)


def make(entry, folder, others):
    """Make `entry` in `folder`; `others` holds a file and a folder that links can lead to."""
    path = folder / os.fsdecode(entry.name)
    if entry.kind == "file":
        path.write_bytes(entry.name)
    elif entry.kind == "hard link":
        path.hardlink_to(others / "photo.jpg")
    elif entry.kind == "pipe":
        os.mkfifo(path)
    elif entry.kind in ("folder", "empty folder"):
        path.mkdir()
        if entry.kind == "folder":
            (path / path.name).write_bytes(entry.name)
    else:
        targets = {"link to a file": "photo.jpg", "link to a folder": "class", "link to nothing": "nothing"}
        path.symlink_to(others / targets[entry.kind] if entry.kind in targets else folder)


def contents(folder):
    """{path below `folder`: content of the file, or None for a folder}, links followed."""
    found = {}
    for place, folders, files in os.walk(folder, followlinks=True):
        for name in (*folders, *files):
            path = Path(place, name)
            found[path.relative_to(folder)] = None if path.is_dir() else path.read_bytes()
    return found


@settings(derandomize=True, max_examples=40, deadline=None)
@given(st.lists(ENTRIES, max_size=6, unique_by=lambda entry: entry.name))
def test_what_pack_writes_unpack_reads_and_the_rest_pack_refuses(entries):
    with tempfile.TemporaryDirectory() as temporary, contextlib.redirect_stdout(io.StringIO()):
        where = Path(temporary)
        folder, others, there = where / "photos" / "a class", where / "others", where / "there"
        for parent in (folder, others / "class"):
            parent.mkdir(parents=True)
        for photo in (folder / "a photo", others / "photo.jpg", others / "class" / "1.jpg"):
            photo.write_bytes(photo.name.encode())
        for entry in entries:
            make(entry, folder, others)
        pack = ("pack", "--dataset_name", "image_folder", "--data_dir", folder.parent, "--output", where / "p.tar")
        if any(entry.kind in REFUSED for entry in entries):
            with pytest.raises(UserError, match=r"(?s)^--data_dir .*/photos/a class/.*; remove it$"):
                run_data(*pack)
            assert not (where / "p.tar").exists()
            return
        run_data(*pack)
        run_data("unpack", where / "p.tar", "--data_dir", there)
        assert contents(there / "photos") == contents(folder.parent) and [*there.iterdir()] == [there / "photos"]


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="there is no sha256sum")
def test_sha256sum_reads_the_checksums(photos, tmp_path):
    for name in ("a\nb", "a\\b", "a\u2028b", "a\\b\nc\r"):
        (photos / "train" / "red" / name).write_text("not a photo")
    run_data("pack", "--dataset_name", "image_folder", "--data_dir", photos, "--output", tmp_path / "p.tar")
    with tarfile.open(tmp_path / "p.tar") as archive:
        archive.extractall(tmp_path / "there")
    words = ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"]
    done = subprocess.run(words, cwd=tmp_path / "there", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["empty", "SHA256SUMS"])
def test_pack_refuses_a_folder_without_files_or_with_the_name_of_the_checksums(name, tmp_path):
    (tmp_path / name / "class").mkdir(parents=True)
    if name != "empty":
        (tmp_path / name / "class" / "1.jpg").touch()
    with pytest.raises(UserError, match=r"contains no files to pack|cannot hold a folder of this name; rename it"):
        run_data("pack", "--dataset_name", "image_folder", "--data_dir", tmp_path / name, "--output", tmp_path / "p")


def add_file(archive, name, content):
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a/1.jpg", "b/1.jpg"], "contains 'a', 'b' instead of one folder; it is not from data.py pack"),
        ([f"{k}/1.jpg" for k in range(9)], "contains '0', '1', '2', … instead of one folder"),
        ([], "contains no files instead of one folder"),
        (["1.jpg"], "contains '1.jpg' instead of one folder"),
        (["a/1.jpg", "a/1.jpg/2.jpg"], "there: cannot be written: "),
        (["/a/1.jpg"], "contains '/a/1.jpg', which no data set has"),
        (["a/../../1.jpg"], r"contains 'a/\.\./\.\./1\.jpg', which no data set has"),
        (["a/1\0é.jpg"], "which no data set has"),
        (["."], r"contains '\.', which no data set has"),
    ],
)
def test_archives_that_are_not_from_pack_are_refused(names, message, tmp_path):
    with tarfile.open(tmp_path / "p.tar", "w") as archive:
        for name in names:
            add_file(archive, name, b"a photo")
        lines = [f"{hashlib.sha256(b'a photo').hexdigest()}  {name}\n" for name in names]
        add_file(archive, "SHA256SUMS", "".join(lines).encode())
    with pytest.raises(UserError, match=message):
        run_data("unpack", tmp_path / "p.tar", "--data_dir", tmp_path / "there")
    assert not [*(tmp_path / "there").iterdir()]


def test_an_archive_with_a_file_that_has_no_checksum_is_refused(tmp_path):
    with tarfile.open(tmp_path / "odd.tar", "w") as archive:
        add_file(archive, "photos/a", b"x")
        add_file(archive, "photos/b", b"x")
        add_file(archive, "SHA256SUMS", f"{hashlib.sha256(b'x').hexdigest()}  photos/a\n".encode())
    with pytest.raises(UserError, match=r"odd\.tar: has no checksum of photos/b in it; copy it again"):
        run_data("unpack", tmp_path / "odd.tar", "--data_dir", tmp_path / "there")
    assert not [*(tmp_path / "there").iterdir()]


def test_an_archive_that_names_its_members_from_the_current_folder_is_unpacked(photos, tmp_path):
    run_data("pack", "--dataset_name", "image_folder", "--data_dir", photos, "--output", tmp_path / "p.tar")
    with tarfile.open(tmp_path / "p.tar") as archive:
        archive.extractall(tmp_path / "by_hand")
    with tarfile.open(tmp_path / "again.tar", "w") as archive:
        archive.add(tmp_path / "by_hand", ".")
    run_data("unpack", tmp_path / "again.tar", "--data_dir", tmp_path / "there")
    assert contents(tmp_path / "there" / "photos") == contents(photos)


def test_the_leftovers_of_killed_commands_are_removed(photos, tmp_path):
    left = [tmp_path / ".123.p.tar", tmp_path / "there" / ".123.abc.unpacking" / "photos" / "1.jpg"]
    kept = [tmp_path / ".123.other.tar", tmp_path / "there" / ".unpacking"]
    for path in (*left, *kept):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half")
    run_data("pack", "--dataset_name", "image_folder", "--data_dir", photos, "--output", tmp_path / "p.tar")
    run_data("unpack", tmp_path / "p.tar", "--data_dir", tmp_path / "there")
    assert [path.exists() for path in (*left, left[1].parents[1], *kept)] == [False, False, False, True, True]


def damage(path, how):
    """Damage the archive `path` in place."""
    content = path.read_bytes()
    if how in ("gzip", "bz2", "lzma"):
        content = import_module(how).compress(content)
    if how == "foreign":
        with tarfile.open(path, "w") as archive:
            archive.add(ROOT / "README.md", "../README.md")
    elif how == "changed":
        at = content.index(b"IDAT") + 8
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    else:
        path.write_bytes(b"anything" if how == "no archive" else content[: len(content) // 2])


DAMAGED = r"is not a tar archive, or damaged or incomplete \(.+\); copy it again"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("incomplete", DAMAGED),
        ("gzip", DAMAGED),
        ("bz2", DAMAGED),
        ("lzma", DAMAGED),
        ("changed", r"/0\.png in it does not match its checksum; copy it again"),
        ("no archive", DAMAGED),
        ("foreign", "contains '../README.md', which no data set has"),
    ],
)
def test_unpacking_a_damaged_archive_leaves_no_files(how, message, photos, tmp_path):
    run_data("pack", "--dataset_name", "image_folder", "--data_dir", photos, "--output", tmp_path / "p.tar")
    damage(tmp_path / "p.tar", how)
    with pytest.raises(UserError, match=message):
        run_data("unpack", tmp_path / "p.tar", "--data_dir", tmp_path / "there")
    assert not [*(tmp_path / "there").iterdir()]


def test_missing_data_and_wrong_arguments_are_refused(photos, tmp_path):
    with pytest.raises(
        UserError, match=r"not prepared in .*; first run python data.py prepare --dataset_name stanford_dogs"
    ):
        run_data("pack", "--dataset_name", "stanford_dogs", "--data_dir", tmp_path)
    with pytest.raises(UserError, match=r"--output .*/p.tar: lies inside .*, the folder to pack"):
        run_data("pack", "--dataset_name", "image_folder", "--data_dir", photos, "--output", photos / "p.tar")
    with pytest.raises(UserError, match="'digits' is not one of"):
        run_data("pack", "--dataset_name", "digits")
    with pytest.raises(UserError, match=r"there is no file '.*none.tar'"):
        run_data("unpack", tmp_path / "none.tar", "--data_dir", tmp_path)
    with pytest.raises(UserError, match=r"--test_fraction: .*--dataset_name image_folder"):
        run_data("show", "--test_fraction", "0.2")


def test_data_py_runs_show_and_refuses_a_mistyped_command_in_one_line(tmp_path):
    def command(*words):
        return subprocess.run(
            [sys.executable, str(ROOT / "data.py"), *map(str, words)],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            cwd=tmp_path,
        )

    done = command("show")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "figures" / "digits_train.png").is_file()
    done = command("shwo")
    assert done.returncode == 2 and "Traceback" not in done.stderr and len(done.stderr.splitlines()) == 1
