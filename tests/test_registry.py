"""A flag is one field and a name is one entry: one of each is added from outside, and used."""

from contextlib import ExitStack
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np
import plotting
import pytest
from conftest import CLASSES, SIZE, make_small_data, make_small_model, make_table
from elastic_trainer.cli.data_command import parse_data
from elastic_trainer.cli.flags import add_flags
from elastic_trainer.registry import (
    DATASETS,
    IMPORTANCES,
    SCHEMES,
    DatasetEntry,
    ImportanceEntry,
    Lazy,
    SchemeEntry,
    add_importance,
    elastic,
)
from interrupted_runs import InterruptingData, PowerCut
from small_networks import values
from small_runs import rows_of, run

import data
import train
from elastic_trainer.cli.commands import parse_training
from elastic_trainer.datasets.images import ImageFiles
from elastic_trainer.datasets.sources import DataSource, class_names
from elastic_trainer.networks.tensors import head_mask, tensor_names
from elastic_trainer.runs.reader import CONFIG
from elastic_trainer.runs.run_log import RunLog
from elastic_trainer.selection.elastic import make_budget
from elastic_trainer.selection.importance import ImportanceEvaluator
from elastic_trainer.selection.schemes import FixedScheme
from elastic_trainer.selection.select import select_upper_part
from elastic_trainer.settings import (
    MAIN_FLAGS,
    PAPER,
    Settings,
    check_names,
    defaults_of,
)
from elastic_trainer.settings.flags import OneLineParser, flag, flags_of, from_options, share
from elastic_trainer.system.errors import UserError
from elastic_trainer.system.files import write_record

SELECTED: list[tuple[object, ...]] = []  # arguments of `select_counted`
REGISTRIES = (SCHEMES, IMPORTANCES, DATASETS)
TWO_STEPS = Settings(learning_rate=0.05, num_epochs=1, max_steps=2, interval=1, rho=0.6, deterministic=True)


@pytest.fixture(autouse=True)
def registries():
    """What a test adds is gone after it."""
    with ExitStack() as stack:
        for registry in REGISTRIES:
            stack.enter_context(patch.dict(registry))
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

    SCHEMES.add("stem_training", SchemeEntry(make, "Stem", "the stem and the head", uses=("trained_layers",)))
    command = parse_training(["--train_type", "stem_training", "--trained_layers", "2"])
    assert command.train_type == command.config["train_type"] == "stem_training" and command.warnings == ()
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

    add_importance("stem", ImportanceEntry(OfTheStem, reads_images=False), "Stem", "the stem if it fits")
    words = "--dataset_name digits --train_type elastic_training_stem --importance_batches 2"
    command = parse_training(words.split())
    [warning] = command.warnings
    assert "only for schemes that measure importance on images" in warning
    assert command.run.run_name == "mobilenetv2-0.35_digits_elastic_training_stem_rho0.45"
    model = make_small_model()
    settings = Settings(learning_rate=0.05, max_steps=2, rho=0.9, deterministic=True)
    run(tmp_path, train.elastic_training_stem, settings, model, make_table(model))
    chosen = {row["name"] for row in rows_of(tmp_path / "selections.csv") if row["chosen"] == "1"}
    assert chosen == {"stem/kernel", "head/kernel", "head/bias"}


def select_counted(*args):
    """The upper part, by a Tensor Selector from outside."""
    SELECTED.append(args)
    return select_upper_part(*args)


def add_counted():
    SELECTED.clear()
    entry = elastic("Counted", "the upper part, counted", select=f"{__name__}:select_counted")
    SCHEMES.add("elastic_training_counted", entry)


def test_a_selector_from_outside_is_recorded_by_name_and_continues_only_where_it_is_known(tmp_path, monkeypatch):
    add_counted()
    words = ["--train_type", "elastic_training_counted", "--logdir", str(tmp_path), "--run_name", "mine"]
    started = parse_training([*words, "--recipe", "robust"])
    assert started.config["train_type"] == "elastic_training_counted"
    write_record(tmp_path / "mine" / CONFIG, started.config)
    assert parse_training(["--resume", str(tmp_path / "mine")]).train_type == "elastic_training_counted"
    monkeypatch.delitem(SCHEMES, "elastic_training_counted")
    with pytest.raises(UserError, match="--train_type: 'elastic_training_counted' is not one of"):
        parse_training(["--resume", str(tmp_path / "mine")])


def test_an_interrupted_run_continues_with_a_selector_from_outside(tmp_path):
    add_counted()
    settings = Settings(learning_rate=0.05, num_epochs=2, interval=1, rho=0.6, deterministic=True, checkpoint_minutes=0)

    def start(data):
        model = make_small_model()
        budget = make_budget(model, data, settings, make_table(model))
        with RunLog(tmp_path, {"seed": 0}, tensor_names(model)) as log:
            train.train("elastic_training_counted", model, data, settings, log, budget)

    with pytest.raises(PowerCut):
        start(InterruptingData(3))
    assert len(SELECTED) == 1
    start(make_small_data())
    assert len(SELECTED) == 2, "the selection of the second epoch"


def test_a_data_set_from_outside_is_parsed_read_and_trained_on(tmp_path):
    def read(data_dir):
        def images():
            return ((np.full((SIZE, SIZE, 3), 80 * k, np.uint8), k) for k in range(CLASSES))

        shades = ImageFiles(CLASSES, images)
        return DataSource(names, shades, shades)

    names = [f"shade {k}" for k in range(CLASSES)]
    DATASETS.add(
        "shades", DatasetEntry(read, lambda data_dir: names, {"input_size": SIZE, "rho": 0.7}, uses=("data_dir",))
    )
    command = parse_training(["--dataset_name", "shades", "--data_dir", str(tmp_path), "--batch_size", "3"])
    assert (command.network.input_size, command.training.rho) == (SIZE, 0.7)
    assert command.network.model_name == PAPER["model_name"]
    with pytest.raises(UserError, match=r"--test_fraction: .*--dataset_name image_folder"):
        parse_training(["--dataset_name", "shades", "--test_fraction", "0.2"])
    assert parse_data(["show", "--dataset_name", "shades"]).dataset_name == "shades"
    assert [*class_names(command.data)] == names
    images = data.load(command.data, SIZE, 3)
    assert [*images.class_names] == ["shade 0", "shade 1", "shade 2"]
    model = make_small_model()
    before = values(model.trainable_variables)
    log = RunLog(tmp_path / "run", {}, tensor_names(model))
    with log:
        summary = train.full_training(model, images, Settings(learning_rate=0.05, num_epochs=2), log)
    assert summary["steps"] == 2 and moved(model, before)


# --- strict look-up ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("registry", "word", "line"),
    [
        (
            SCHEMES,
            "elastic",
            "--train_type: 'elastic' is not one of full_.*; did you mean 'elastic_training'",
        ),
        (IMPORTANCES, "gains", "importance: 'gains' is not one of gain, .*; did you mean 'gain'"),
        (DATASETS, "digit", "--dataset_name: 'digit' is not one of .*; did you mean 'digits'"),
    ],
)
def test_a_name_that_is_not_known_is_one_line_that_names_the_flag_and_the_known_names(registry, word, line):
    with pytest.raises(UserError, match=line):
        registry[word]
    assert word not in registry


def test_training_with_an_optimizer_that_only_settings_know_is_refused(tmp_path):
    with pytest.raises(UserError, match="--optimizer: 'lion' is not one of sgd, adam"):
        run(tmp_path, train.full_training, Settings(optimizer="lion", max_steps=1))


@pytest.mark.parametrize("registry", REGISTRIES)
def test_a_name_is_registered_once(registry):
    name = next(iter(registry))
    with pytest.raises(ValueError, match=f"{name}: is registered already"):
        registry.add(name, registry[name])


def test_code_of_an_entry_is_imported_when_it_is_first_called():
    assert Lazy("fractions:Fraction", denominator=3)(6) == 2
    with pytest.raises(ModuleNotFoundError):
        Lazy("no_such_module:thing")()


# --- flags ------------------------------------------------------------------------------------------------------------


def test_a_field_of_a_settings_class_is_the_flag():
    @dataclass(frozen=True)
    class More:
        amount: float = flag(0.5, "More", share, "SHARE", help="an [amount](page.md) of `x`")
        is_on: bool = flag(False, "More", help="a switch")

    parser = OneLineParser(prog="more.py")
    add_flags(parser, flags_of(More))
    assert from_options(More, vars(parser.parse_args([]))) == More(0.5, False)
    assert from_options(More, vars(parser.parse_args(["--amount", "0.25", "--is_on"]))) == More(0.25, True)
    assert "an amount of x (default: 0.5)" in parser.format_help()
    with pytest.raises(UserError, match=r"--amount: .* not '2'"):
        parser.parse_args(["--amount", "2"])


def test_flags_reach_their_fields_and_the_record_of_the_run():
    words = "--model_name mobilenetv2 --alpha 0.5 --seed 3 --augment none --deterministic --gradient_clipping 0.3"
    words += " --memory 900M --plan --rho 0.3"
    command = parse_training([*words.split(), "--export_rho", "0.3,0.7", "--export", "train_tflite"])
    default = parse_training([]).config
    values = {**vars(command.network), **vars(command.data), **vars(command.training), **vars(command.run)}
    values["export_rho"] = command.options["export_rho"]
    wanted = {"seed": 3, "alpha": 0.5, "augment": "none", "deterministic": True, "gradient_clipping": 0.3}
    wanted |= {"memory": 900.0, "plan": True, "rho": 0.3, "export_rho": (0.3, 0.7), "export": "train_tflite"}
    assert {name: values[name] for name in wanted} == wanted
    assert all(command.config[name] != default[name] for name in wanted)
    assert command.network.clips_gradients and not parse_training([]).network.clips_gradients


def test_a_default_for_what_is_no_flag_is_an_error():
    DATASETS.add("odd", DatasetEntry(lambda: None, lambda: ["a", "b"], {"input_sise": 32}))
    with pytest.raises(ValueError, match="'input_sise'"):
        defaults_of("odd")
    with pytest.raises(ValueError, match="'clipping'"):
        check_names({"clipping": 1}, MAIN_FLAGS)
