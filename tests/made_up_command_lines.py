"""Made-up command lines: any flags together, with the paper's defaults, a data set's, and other values."""

from hypothesis import strategies as st

from elastic_trainer.settings import MAIN_FLAGS, PRESETS

PAPER, PHOTOS, DIGITS = PRESETS["paper"], PRESETS["photos"], PRESETS["demo"]
FOLDERS = ("logs", "None", "./-photos", "my photos", "photos")
_VALUES = {
    "model_name": (PAPER.model_name, PHOTOS.model_name, "mobilenet", __file__ + ":command_lines"),
    "input_size": (PAPER.input_size, PHOTOS.input_size, DIGITS.input_size, 48),
    "batch_size": (PAPER.batch_size, 32, DIGITS.batch_size),
    "weights": ("imagenet", "none"),
    "optimizer": ("sgd", "adam"),
    "seed": (0, 3),
    "augment": ("none", "flip", "flip_rotate"),
    "learning_rate": (PAPER.learning_rate, 0.02, 1 / 3),
    "weight_decay": (PAPER.weight_decay, 0.0, 1 / 3),
    "preset": ("paper", "photos", "demo"),
    "test_fraction": (0.2, 1 / 3),
    "logdir": FOLDERS,
}
_NETWORK = ("model_name", "input_size", "batch_size", "weights", "optimizer", "seed", "preset")


@st.composite
def command_lines(draw, more=(), names=_NETWORK):
    """Words that main.py takes: some flags of these names."""
    dataset = draw(st.sampled_from([None, "digits", "image_folder", "caltech_birds2011"]))
    chosen = {name: draw(st.sampled_from(_VALUES[name])) for name in (*names, *more) if draw(st.booleans())}
    is_photos = dataset == "image_folder"
    if dataset is not None:
        chosen["dataset_name"] = dataset
    if is_photos:
        chosen["data_dir"] = draw(st.sampled_from(FOLDERS))
    else:
        chosen = {name: value for name, value in chosen.items() if name != "test_fraction"}
    model = chosen.get("model_name")
    if model == "mobilenet" and draw(st.booleans()):
        chosen["alpha"] = draw(st.sampled_from([PAPER.alpha, 0.35, 1 / 3]))
    if model is not None and ".py:" in model:
        chosen.pop("weights", None)
    assert {*chosen} <= {*MAIN_FLAGS}
    return [f"--{name}={value}" for name, value in chosen.items()]
