"""A name is one entry of a plain dictionary: one of each is added from outside, and used."""

from contextlib import ExitStack
from unittest.mock import patch

import numpy as np
import plotting
import pytest
from conftest import CLASSES, SIZE, make_small_data, make_small_model, make_table
from small_networks import values
from small_runs import rows_of, run

import data
import train
from elastic_trainer import Trainer
from elastic_trainer.cli.checks import without_effect
from elastic_trainer.cli.commands import parse_training, parser_of
from elastic_trainer.datasets.images import ImageFiles
from elastic_trainer.datasets.named import DATASETS, DatasetEntry, class_names
from elastic_trainer.datasets.sources import DataSource
from elastic_trainer.networks.tensors import head_mask, tensor_names
from elastic_trainer.runs.run_log import RunLog
from elastic_trainer.selection.importance import ImportanceEvaluator
from elastic_trainer.selection.named import IMPORTANCES, SCHEMES, SchemeEntry, elastic
from elastic_trainer.selection.schemes import FixedScheme
from elastic_trainer.settings import MAIN_FLAGS, PRESETS, Settings
from elastic_trainer.system.errors import UserError

DICTIONARIES = (SCHEMES, IMPORTANCES, DATASETS)
TWO_STEPS = Settings(learning_rate=0.05, num_epochs=1, max_steps=2, interval=1, rho=0.6, deterministic=True)


@pytest.fixture(autouse=True)
def dictionaries():
    """What a test adds is gone after it."""
    with ExitStack() as stack:
        for one in DICTIONARIES:
            stack.enter_context(patch.dict(one))
        yield


def moved(model, before):
    """Names of the tensors that differ from `before`."""
    names = tensor_names(model)
    return {
        name
        for name, now, old in zip(names, values(model.trainable_variables), before, strict=True)
        if (now != old).any()
    }


# --- one of each from outside -----------------------------------------------------------------------------------------


def test_a_scheme_from_outside_is_parsed_trained_recorded_and_drawn(tmp_path):
    def make(context):
        return FixedScheme(
            np.array(["stem/" in name for name in tensor_names(context.task.model)]) | head_mask(context.task.model)
        )

    SCHEMES["stem_training"] = SchemeEntry(make, "Stem", "the stem and the head")
    settings = parse_training(["--train_type", "stem_training"])
    assert settings.train_type == settings.to_record()["train_type"] == "stem_training"
    model = make_small_model()
    before = values(model.trainable_variables)
    run(tmp_path / "run", train.stem_training, TWO_STEPS, model)
    assert moved(model, before) == {"stem/kernel", "head/kernel", "head/bias"}
    assert plotting.look_of("stem_training").label == "Stem"
    assert plotting.look_of("never_heard_of").label == "never_heard_of"


def test_an_importance_from_outside_is_a_scheme_that_selects_by_it(tmp_path):
    class OfTheStem(ImportanceEvaluator):
        def _measure(self, optimizer, batches):
            return np.array([float("stem/" in name) for name in tensor_names(self._model)])

    IMPORTANCES["stem"] = OfTheStem
    SCHEMES["elastic_training_stem"] = elastic("Stem", "the stem if it fits", "stem")
    words = "--dataset_name digits --train_type elastic_training_stem --importance_batches 2"
    settings = parse_training(words.split())
    assert without_effect({"importance_batches": 2}, settings) == []
    assert settings.run_name == "mobilenetv2-0.35_digits_elastic_training_stem_rho0.45"
    model = make_small_model()
    settings = Settings(learning_rate=0.05, max_steps=2, rho=0.9, deterministic=True)
    run(tmp_path, train.elastic_training_stem, settings, model, make_table(model))
    chosen = {row["name"] for row in rows_of(tmp_path / "selections.csv") if row["chosen"] == "1"}
    assert chosen == {"stem/kernel", "head/kernel", "head/bias"}


def test_a_data_set_from_outside_is_parsed_read_and_trained_on(tmp_path):
    def read(settings):
        def images():
            return ((np.full((SIZE, SIZE, 3), 80 * k, np.uint8), k) for k in range(CLASSES))

        shades = ImageFiles(CLASSES, images)
        return DataSource(names, shades, shades)

    names = [f"shade {k}" for k in range(CLASSES)]
    DATASETS["shades"] = DatasetEntry(read, lambda settings: names, "demo", ("data_dir",))
    words = ["--dataset_name", "shades", "--data_dir", str(tmp_path), "--batch_size", "3", "--input_size", str(SIZE)]
    settings = parse_training(words)
    assert (settings.preset, settings.rho) == ("demo", PRESETS["demo"].rho)
    with pytest.raises(UserError, match=r"--test_fraction: .*--dataset_name image_folder"):
        parse_training(["--dataset_name", "shades", "--test_fraction", "0.2"])
    assert [*class_names(settings)] == names
    images = data.load(settings)
    assert [*images.class_names] == ["shade 0", "shade 1", "shade 2"]
    model = make_small_model()
    before = values(model.trainable_variables)
    log = RunLog(tmp_path / "run", {}, tensor_names(model))
    with log:
        summary = train.full_training(model, images, Settings(learning_rate=0.05, num_epochs=2), log)
    assert summary["steps"] == 2 and moved(model, before)


# --- strict look-up ---------------------------------------------------------------------------------------------------


def test_a_scheme_that_is_not_known_is_one_line_that_names_the_flag_and_the_known_names():
    with pytest.raises(UserError, match=r"--train_type: 'elastic' is not one of full_.*; did you mean"):
        Trainer(make_small_model(), make_small_data(), "elastic")


# --- flags ------------------------------------------------------------------------------------------------------------


def test_presets_are_complete_and_every_flag_is_in_help():
    assert all(isinstance(preset, Settings) and preset.preset == name for name, preset in PRESETS.items())
    text = parser_of("main.py").format_help()
    assert all(f"--{name} " in text for name in MAIN_FLAGS) and len(MAIN_FLAGS) <= 33
