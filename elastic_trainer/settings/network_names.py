"""The networks that `--model_name` takes. No TensorFlow, so that the command line can check a name at once."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from elastic_trainer.system.errors import did_you_mean

MODEL_NAMES = ("resnet50", "vgg16", "mobilenetv2", "vit")  # the paper's networks
_KERAS = (
    *("ConvNeXtTiny", "ConvNeXtSmall", "ConvNeXtBase", "ConvNeXtLarge", "ConvNeXtXLarge"),
    *("DenseNet121", "DenseNet169", "DenseNet201", "InceptionResNetV2", "InceptionV3"),
    *(f"EfficientNetB{k}" for k in range(8)),
    *(f"EfficientNetV2{kind}" for kind in ("B0", "B1", "B2", "B3", "S", "M", "L")),
    *("MobileNet", "MobileNetV2", "MobileNetV3Large", "MobileNetV3Small", "NASNetLarge", "NASNetMobile"),
    *("ResNet50", "ResNet50V2", "ResNet101", "ResNet101V2", "ResNet152", "ResNet152V2", "VGG16", "VGG19", "Xception"),
)
# All networks of keras.applications: the name on the command line, which ignores case -> Keras' name.
KERAS_NETWORKS = {name.lower(): name for name in _KERAS}
PACKAGED_NETWORK = "efficientnetlite0"  # its ImageNet weights are a package of the index
SMALL_NETWORK, SMALL_WIDTH = "mobilenetv2", 0.35  # where time or memory is short, or a board is to train
USUAL_SIZE = 160  # of the input on photos, in pixels, where no deadline decides it
WIDTHS = ("mobilenet", "mobilenetv2", "mobilenetv3large", "mobilenetv3small")  # the networks that have an --alpha
GLYPH_WEIGHTS = Path(__file__).resolve().parents[2] / "weights" / "mobilenetv2_0.35_glyphs.weights.h5"
GLYPH_HEAD = GLYPH_WEIGHTS.with_name("mobilenetv2_0.35_glyphs_head.npz")  # for the ten digits


def is_custom_model(model_name: str | None) -> bool:
    """Whether `--model_name` names the user's own model (a .keras file, or file.py:function)."""
    return model_name is not None and (model_name.endswith(".keras") or ".py:" in model_name)


def model_label(model_name: str, alpha: float) -> str:
    """A short name of the network that suits a folder."""
    if is_custom_model(model_name):
        file, _, function = model_name.partition(".py:")
        return "-".join(filter(None, (Path(file).stem, function)))
    wide = model_name not in WIDTHS or alpha == 1
    return model_name if wide else f"{model_name}-{alpha:g}"


def known_network(text: str) -> str:
    """A type for argparse: a network we know, in any case, a .keras file, or file.py:function; the file must exist."""
    if is_custom_model(text):
        file = text if text.endswith(".keras") else text.rpartition(":")[0]
        if not Path(file).is_file():
            raise argparse.ArgumentTypeError(f"there is no file '{file}'")
        return os.path.normpath(text)
    if text.endswith(".h5"):
        raise argparse.ArgumentTypeError(
            f"'{text}' may hold code, and Keras 3 cannot load DepthwiseConv2D of Keras 2; if you trust it, "
            "give FILE.py:FUNCTION, a function that returns keras.models.load_model(…, compile=False, custom_objects="
            "{'DepthwiseConv2D': …}) with a from_config that drops 'groups'"
        )
    known = (*MODEL_NAMES, PACKAGED_NETWORK, *KERAS_NETWORKS)
    if text.lower() in known:
        return text.lower()
    raise argparse.ArgumentTypeError(
        f"'{text}' is not one of {', '.join((*MODEL_NAMES, PACKAGED_NETWORK))}, FILE.keras, FILE.py:FUNCTION, or a "
        f"network of keras.applications{did_you_mean(text, known)}"
    )


def known_weights(text: str) -> str:
    """A type for argparse: imagenet, none, or the path of a file or of a run's folder, which must exist."""
    if text in ("imagenet", "none") or (text and Path(text).exists()):
        return text
    hint = did_you_mean(text, ("imagenet", "none"))
    raise argparse.ArgumentTypeError(
        f"'{text}' is neither imagenet nor none, and there is no such file or folder of a run{hint}"
    )
