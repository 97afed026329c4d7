"""The parsers name each mistake on the command line; defaults follow the data set and the model."""

import re
import shlex
from dataclasses import replace

import pytest

import data
from elastic_trainer.cli.commands import parse_main, parse_profiler, parse_training, profiler_command
from elastic_trainer.runs.reader import CONFIG
from elastic_trainer.settings import PRESETS, Settings
from elastic_trainer.settings.flags import duration, duration_text
from elastic_trainer.settings.network_names import GLYPH_WEIGHTS
from elastic_trainer.system.errors import UserError
from elastic_trainer.system.files import write_record
from elastic_trainer.timing.table_file import table_folder, table_settings

CUB = "caltech_birds2011"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model_name resnet5", "--model_name: 'resnet5' is not one of resnet50, .*; did you mean 'resnet50'?"),
        ("--model_name MobileNet-V2", "--model_name: .*; did you mean 'mobilenetv2'?"),
        ("--dataset_name cifar", "--dataset_name: 'cifar' is not one of"),
        ("--train_type elastic", "--train_type: 'elastic' is not one of .*; did you mean 'elastic_training'?"),
        ("--rho 1.5", "--rho: .*at most 1, not '1.5'"),
        ("--rho 0", "--rho: .*not '0'"),
        ("--batch_size -4", "--batch_size: .*from 1 to 65,536, not '-4'"),
        ("--batch_size 4.0", "--batch_size: .*from 1 to 65,536, not '4.0'"),
        ("--batch_size", "--batch_size: expected one argument"),
        ("--seed 2147483648", "--seed: .*from 0 to 2,147,483,647, not '2147483648'"),
        ("--learning_rate -1e-3", "--learning_rate: "),  # a flag to older Pythons, a number to newer
        ("--weight_decay inf", "--weight_decay: .*from 0 to 100, not 'inf'"),
        ("--memory 120%", "--memory: must be a size, such as 900M, 1.5G or 80%, not '120%'"),
        ("--deadline 0", "--deadline: .*not '0'"),
        ("--deadline 2d", "--deadline: .* not '2d'"),
        ("--weights imagnet", "--weights: 'imagnet' is neither .* or folder of a run; did you mean 'imagenet'?"),
        (
            "--weights no/such.h5",
            "--weights: 'no/such.h5' is neither imagenet nor none, and there is no such file or folder of a run$",
        ),
        ("--weights ''", "--weights: "),
        (f"--model_name {__file__}:network --weights imagenet", "--weights: imagenet is not for .*, which has its own"),
        ("--model_name vgg16 --alpha 0.5", "--alpha: vgg16 has one width only"),
        ("--dataset_name digits --data_dir photos", "--data_dir: .* --dataset_name .* image_folder, not digits"),
        ("--save_model maybe", "--save_model: must be True or False, not 'maybe'"),
        ("--run_name a/b", "--run_name: .*'a/b'"),
        ("--run_name ''", "--run_name: .*''"),
        ("--run_name 'a\nb'", "--run_name: "),
        ("--run_name profiles", "--run_name: 'profiles'"),
        (f"--run_name {'é' * 120}", "--run_name é{20}…: has 240 bytes; give at most 230"),
        ("--rhoo 1", "--rhoo: there is no such flag; did you mean '--rho'?"),
        ("--batch-size=4", "--batch-size: there is no such flag; did you mean '--batch_size'?"),
        ("--num 4", "--num: there is no such flag"),  # flags cannot be abbreviated
        ("--qqq", "--qqq: there is no such flag; --help lists them"),
        ("resnet50", "'resnet50': unexpected argument"),
        ("''", "'': unexpected argument"),
        ("--seconds 9", "--seconds: is a flag of profiler.py, not of main.py"),
        ("--from_trace no.xplane.pb", "--from_trace: is a flag of profiler.py, not of main.py"),
        (f"--logdir {__file__}/logs", f"--logdir: {__file__} is a file; give a folder"),
        (
            "--deadline 9 --train_type closed_form_head",
            "--deadline: cannot be combined with --train_type closed_form_head, which takes one step",
        ),
        ("--plan --train_type full_training", "--plan: does not work with --train_type full_training, which has no t"),
        ("--deterministic --deadline 9", "--deterministic: cannot be combined with --deadline, which depends on the"),
        ("--train_type prunetrain --micro_batch 4", "--micro_batch: cannot be combined with --train_type prunetrain"),
        ("--export tflite --save_model False", "--export tflite: needs the best model; leave out --save_model False"),
        (
            "--export board --max_steps 5",
            "--max_steps: cannot be combined with --export board; give --num_ep",
        ),
        ("--model_name keras_model.h5", "--model_name: 'keras_model.h5' may hold code, .* FILE.py:FUNCTION, .*groups"),
        ("--preset photo", "--preset: 'photo' is not one of paper, photos, demo; did you mean 'photos'?"),
    ],
)
def test_a_mistake_is_answered_by_a_line_that_names_it(words, message):
    with pytest.raises(UserError) as caught:
        parse_main(shlex.split(words))
    assert re.match(message.replace("?", r"\?"), str(caught.value)), str(caught.value)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((0.04, "0.04s"), (8.31, "8.3s"), (9.7, "10s"), (90.5, "90s"), (119.6, "2m"), (158.2, "2m 38s")),
        *((180, "3m"), (5400, "90m"), (7199.8, "2h"), (8912, "2h 29m"), (9000, "2h 30m")),
    ],
)
def test_times_are_shown_as_a_user_types_them(seconds, text):
    assert duration_text(seconds) == text
    assert seconds % 60 or " " in text or duration(text) == seconds


def test_flag_of_the_other_command_is_reported_as_such():
    with pytest.raises(UserError, match=r"--num_epochs: is a flag of main\.py, not of profiler\.py"):
        parse_profiler(["--num_epochs", "3"])
    with pytest.raises(UserError, match=r"--from_trace: there is no file 'no/such\.xplane\.pb'"):
        parse_profiler(["--from_trace", "no/such.xplane.pb"])
    with pytest.raises(UserError, match=r"^--alpha: '--' is no value; give another$"):
        parse_training(["--dataset_name", "digits", "--alpha=--"])
    with pytest.raises(UserError, match="--num_class: there is no such flag; did you mean '--num_classes'"):
        parse_profiler(["--num_class", "3"])
    with pytest.raises(UserError, match="--dataset: there is no such flag; did you mean '--dataset_name'"):
        data.parse(["prepare", "--dataset_name", "stanford_dogs", "--dataset", "digits"])


def test_defaults_follow_the_data_set_and_the_model():
    digits = parse_training(["--dataset_name", "digits"])
    assert (digits.preset, digits.model_name, digits.alpha, digits.input_size) == ("demo", "mobilenetv2", 0.35, 64)
    assert digits.weights == str(GLYPH_WEIGHTS)
    assert digits.augment == "none"
    paper = parse_training([])
    assert (paper.model_name, paper.input_size, paper.batch_size) == ("resnet50", 224, 4)
    assert (paper.weights, paper.learning_rate) == ("imagenet", 1e-4)
    assert (paper.num_epochs, paper.interval, paper.optimizer) == (12, 3, "sgd")
    assert (paper.dataset_name, paper.augment, paper.feature_cache) == (CUB, "flip", "off")
    assert (paper.train_type, paper.preset, paper.has_fillers) == ("elastic_training", "paper", False)
    assert replace(paper, run_name="") == Settings() == PRESETS["paper"]
    assert parse_training(["--model_name", "vit"]).optimizer == "adam"
    for other in (["--model_name", "resnet50"], ["--alpha", "1.0"]):
        assert parse_training(["--dataset_name", "digits", *other]).weights == "imagenet"
    given = parse_training(["--weights", "none", "--learning_rate", "0.5", "--save_model", "False"])
    assert (given.weights, given.learning_rate, given.save_model) == ("none", 0.5, False)


def training_of(*arguments):
    """Scheme, clipping, warm-up and learning rate that a command line asks for."""
    settings = parse_training(arguments)
    scheme = settings.train_type.removeprefix("elastic_training")
    return scheme, settings.gradient_clipping, settings.warmup, settings.learning_rate


def test_a_preset_sets_what_is_not_given():
    photos = ["--dataset_name", "image_folder", "--data_dir", "photos"]
    chosen = None  # the learning rate follows the batch, which the run chooses
    assert training_of(*photos) == ("_upper_part", 0.02, 0.1, chosen)
    digits = ["--dataset_name", "digits"]
    assert training_of(*digits, "--preset", "photos") == ("_upper_part", 0.02, 0.1, chosen)
    assert training_of(*photos, "--preset", "paper") == ("", 0, 0, 1e-4)
    assert training_of(*digits) == ("", 0, 0, 2e-3)
    assert training_of() == ("", 0, 0, 1e-4)
    given = ["--learning_rate", "0.1", "--train_type", "elastic_training"]
    assert training_of(*photos, *given) == ("", 0.02, 0.1, 0.1)
    assert training_of(*photos, "--optimizer", "adam") == ("", 0, 0, 1e-4)
    assert training_of(*photos, "--model_name", "vit") == ("", 0, 0, 1e-4)
    assert training_of(*photos, "--train_type", "prunetrain") == ("prunetrain", 0, 0, 1e-4)
    assert training_of(*digits, "--train_type", "prunetrain") == ("prunetrain", 0, 0, 2e-3)
    assert training_of(*photos, "--train_type", "elastic_training") == ("", 0.02, 0.1, chosen)
    assert training_of(*photos, "--train_type", "full_training") == ("full_training", 0.02, 0.1, chosen)
    assert training_of(*photos, "--train_type", "elastic_training_random") == ("_random", 0.02, 0.1, chosen)
    assert training_of(*photos, "--deadline", "60") == training_of(*photos)
    deadline = ["--deadline", "60"]
    for more, augment in (([], "flip"), (deadline, "flip_crop"), ([*deadline, "--augment", "flip"], "flip")):
        assert parse_training([*photos, *more]).augment == augment
    for random in (["--weights", "none"], ["--model_name", f"{__file__}:network"]):
        assert training_of(*photos, *random) == ("", 0.02, 0.1, chosen)


@pytest.mark.parametrize("model", ["resnet50", "vgg16", "mobilenetv2", "vit"])
@pytest.mark.parametrize(("data", "classes"), [(CUB, 200), ("oxford_iiit_pet", 37), ("stanford_dogs", 120)])
def test_the_published_commands_agree_on_one_timing_table(model, data, classes):
    """Those of the published README. The first does not name the data set, so all that it needs are the classes."""
    profiled = parse_profiler(["--model_name", model, "--num_classes", str(classes)])
    words = ["--model_name", model, "--dataset_name", data, "--train_type", "elastic_training", "--rho", "0.5"]
    trained = replace(parse_training(words), num_classes=classes)
    assert table_folder(profiled) == table_folder(trained)
    assert table_settings(profiled) == table_settings(trained)
    assert (trained.input_size, trained.batch_size, trained.alpha) == (224, 4, 1.0)
    assert profiled.weights == "none", "it downloads nothing"


def test_published_values_that_stand_for_what_is_the_default_here(capsys):
    assert parse_main(["--run_name", "auto", "--save_txt", "True"]) == parse_training([])
    assert "--save_txt: accuracy and time are always text: metrics.csv and summary.json" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        "--model_name mobilenet --alpha 0.35 --logdir=./-photos",
        "--dataset_name image_folder --data_dir 'my photos' --model_name mobilenetv2 --optimizer adam --seed 3",
        f"--dataset_name digits --model_name {__file__}:network --preset photos --batch_size 8",
    ],
)
def test_the_suggested_profiler_command_makes_the_table_of_the_same_settings(words):
    settings = replace(parse_training(shlex.split(words)), num_classes=10)
    settings = replace(settings, batch_size=settings.batch_size or 32)
    suggested = parse_profiler(shlex.split(profiler_command(settings))[2:])
    assert table_settings(suggested) == table_settings(settings)
    same = ("logdir", "dataset_name", "data_dir", "seed")
    assert all(getattr(suggested, name) == getattr(settings, name) for name in same)


@pytest.mark.parametrize(
    ("words", "warnings"),
    [
        ("--rho 0.5 --interval 2", []),
        ("--train_type full_training", []),
        (
            "--train_type full_training --rho 0.5 --importance_batches 2",
            ["--rho, --importance_batches: elastic schemes"],
        ),
        (
            "--trained_layers 2 --weight_decay 0 --optimizer adam",
            ["--trained_layers: --train_type last_layers_training", "--weight_decay: --optimizer sgd"],
        ),
        ("--model_name vit --weight_decay 0", ["--weight_decay: --optimizer sgd"]),
        (
            "--train_type elastic_training_upper_part --importance_batches 2",
            ["--importance_batches: schemes that measure importance on images"],
        ),
        (
            "--train_type elastic_training_weight_magnitude --importance_batches 2",
            ["--importance_batches: schemes that measure importance on images"],
        ),
    ],
)
def test_flag_without_effect_is_a_warning_of_one_line(words, warnings, capsys):
    assert isinstance(parse_main(shlex.split(words)), Settings)
    lines = capsys.readouterr().err.splitlines()
    shown = [line.partition(": warning: ")[2].replace("no effect here, only for ", "") for line in lines]
    assert shown == warnings


def started(folder, *words):
    """The settings of a run that was started in `folder` with these flags."""
    settings = parse_training([*words, "--logdir", str(folder.parent), "--run_name", folder.name])
    write_record(folder / CONFIG, settings.to_record())
    return settings


def test_flags_that_resume_takes_from_the_folder_are_without_effect(tmp_path, capsys):
    before = started(tmp_path / "mine", "--train_type", "full_training", "--rho", "0.5")
    resumed = parse_main(["--resume", str(tmp_path / "mine"), "--run_name", "other"])
    assert resumed == replace(before, resume=True)
    [line] = capsys.readouterr().err.splitlines()  # nothing on --rho, which was not given now
    assert "--run_name: no effect here, only for runs that --resume DIR does not" in line


def test_a_run_is_resumed_with_its_settings_and_others_are_refused(tmp_path):
    folder = tmp_path / "mine"
    before = started(folder, "--dataset_name", "digits", "--learning_rate", "0.1", "--memory", "900M")
    same = ["--logdir", str(tmp_path), "--run_name", "mine", "--resume"]
    for words in (["--resume", str(folder)], same, [*same, "--learning_rate", "0.1", "--dataset_name", "digits"]):
        assert parse_training(words) == replace(before, resume=True)
    assert parse_training(["--resume", str(folder), "--memory", "1G"]).memory == 1000
    for flag, value, was in (("learning_rate", "0.2", "with 0.1"), ("deadline", "60", "without it")):
        with pytest.raises(
            UserError, match=rf"--{flag} {value}\S*: the run in {folder} was started {was}; leave it out"
        ):
            parse_training(["--resume", str(folder), f"--{flag}", value])
    for flag in ("dataset_name", "train_type", "export", "preset"):
        write_record(folder / CONFIG, {**before.to_record(), flag: "mine"})  # that another program added
        with pytest.raises(UserError, match=f"--{flag}: 'mine' is not one of"):
            parse_training(["--resume", str(folder)])
    with pytest.raises(UserError, match=rf"--resume {tmp_path}: contains no run"):
        parse_training(["--resume", str(tmp_path)])


@pytest.mark.parametrize(
    ("before", "now", "saves", "exports"),
    [
        (["--save_model"], ["--save_model", "False"], False, None),
        ([], ["--save_model"], True, None),
        (["--export", "tflite"], [], True, "tflite"),
        (["--export", "tflite"], ["--save_model", "False"], False, None),
        (["--save_model", "False"], ["--export", "tflite"], True, "tflite"),
    ],
)
def test_a_resumed_run_may_save_or_export_what_it_did_not_before_and_the_reverse(before, now, saves, exports, tmp_path):
    settings = started(tmp_path / "mine", *before)
    resumed = parse_training(["--resume", str(tmp_path / "mine"), *now])
    assert resumed == replace(settings, resume=True, save_model=saves, export=exports)


def test_a_run_with_a_deadline_is_resumed_with_what_it_chose_by_the_same_command(tmp_path):
    photos = ["--dataset_name", "image_folder", "--data_dir", "photos", "--deadline", "60"]
    for given in ([], ["--interval", "0.5"]):
        folder = tmp_path / f"mine{len(given)}"
        before = started(folder, *photos, *given)
        assert (before.num_epochs, before.interval) == (1000, 0.5 if given else None)
        chosen = replace(before, batch_size=16, learning_rate=0.01)
        write_record(folder / CONFIG, chosen.to_record())
        words = [*photos, *given, "--logdir", str(tmp_path), "--run_name", folder.name, "--resume"]
        assert parse_training(words) == replace(chosen, resume=True)
