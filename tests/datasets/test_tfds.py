"""Data sets of tensorflow-datasets: reading them, and what is reported without a network."""

import re
import shutil

import pytest
import requests
from command_line import run_data
from small_images import shades
from small_tfds import TFDS_CLASSES, prepare_small

import data
from elastic_trainer.datasets.named import class_names
from elastic_trainer.settings import Settings
from elastic_trainer.system.errors import UserError


def small(name, data_dir, **more):
    """Settings of a data set of TFDS at 16 px, with batches of 4."""
    return Settings(dataset_name=name, data_dir=data_dir, input_size=16, batch_size=4, augment="none", **more)


@pytest.mark.parametrize("name", TFDS_CLASSES)
def test_tfds_images_and_labels_are_those_that_tfds_prepared(name, tmp_path, monkeypatch):
    assert len(class_names(small(name, tmp_path))) == TFDS_CLASSES[name]
    prepare_small(name, tmp_path, monkeypatch)
    dataset = data.load(small(name, tmp_path))
    assert (dataset.num_classes, dataset.train_count, dataset.test_count) == (TFDS_CLASSES[name], 8, 5)
    seen = shades(dataset.train(0))
    assert sorted(seen) == list(range(8))
    assert all(abs(shade - 30 * label) < 3 for label, [shade] in seen.items())
    assert shades(dataset.test()) == {label: [30 * label] for label in range(5)}
    assert len(set(dataset.class_names)) == TFDS_CLASSES[name] and all(
        isinstance(one, str) for one in dataset.class_names
    )


def test_a_prepared_folder_works_where_it_is_copied_to(tmp_path, monkeypatch, capsys):
    here, there = tmp_path / "here", tmp_path / "there"
    prepare_small("caltech_birds2011", here, monkeypatch)
    run_data("prepare", "--dataset_name", "caltech_birds2011", "--data_dir", here)
    assert re.search(r"caltech_birds2011 is ready in .*: 8 train, 5 test", capsys.readouterr().out)
    shutil.copytree(here / "caltech_birds2011", there / "caltech_birds2011")
    first, second = (data.load(small("caltech_birds2011", place)) for place in (here, there))
    assert first.record() == second.record()


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*_, **__):
        raise requests.ConnectionError("no route to host")

    monkeypatch.setattr(requests.Session, "request", refuse)


FILES = {
    "caltech_birds2011": ["CUB_200_2011.tgz", "segmentations.tgz"],
    "oxford_iiit_pet": ["images.tar.gz", "annotations.tar.gz"],
    "stanford_dogs": ["images.tar", "lists.tar", "annotation.tar"],
}


@pytest.mark.parametrize("name", TFDS_CLASSES)
def test_without_a_network_the_error_names_each_file_and_its_place(name, tmp_path, no_network):
    with pytest.raises(UserError) as caught:
        data.load(small(name, tmp_path))
    message = str(caught.value)
    assert message.startswith(f"--dataset_name {name}: not prepared in {tmp_path}") and "\n" not in message
    assert "no route to host" in message and message.endswith("--dataset_name digits needs no download")
    assert f"into {tmp_path}/downloads/manual: " in message
    for file in FILES[name]:
        assert re.search(rf"\b{re.escape(file)} from https?://", message), file


def test_a_manually_downloaded_file_with_a_wrong_checksum_is_refused(tmp_path, no_network):
    manual = tmp_path / "downloads" / "manual"
    manual.mkdir(parents=True)
    for file in FILES["oxford_iiit_pet"]:
        (manual / file).write_bytes(b"not what was published")
    with pytest.raises(UserError, match=r"--dataset_name oxford_iiit_pet: .*(checksum|Checksum|wrong).*images.tar.gz"):
        data.load(small("oxford_iiit_pet", tmp_path))
