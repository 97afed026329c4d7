"""The networks that `--model_name` takes. No TensorFlow, so that the command line can check a name at once."""

from __future__ import annotations

from pathlib import Path

MODEL_NAMES = ("resnet50", "vgg16", "mobilenetv2", "vit")  # the paper's networks (section 6)
# All networks of keras.applications; the command line ignores case.
KERAS_NETWORKS = (
    *("ConvNeXtTiny", "ConvNeXtSmall", "ConvNeXtBase", "ConvNeXtLarge", "ConvNeXtXLarge"),
    *("DenseNet121", "DenseNet169", "DenseNet201", "InceptionResNetV2", "InceptionV3"),
    *(f"EfficientNetB{k}" for k in range(8)),
    *(f"EfficientNetV2{kind}" for kind in ("B0", "B1", "B2", "B3", "S", "M", "L")),
    *("MobileNet", "MobileNetV2", "MobileNetV3Large", "MobileNetV3Small", "NASNetLarge", "NASNetMobile"),
    *("ResNet50", "ResNet50V2", "ResNet101", "ResNet101V2", "ResNet152", "ResNet152V2", "VGG16", "VGG19", "Xception"),
)
WIDTHS = ("mobilenet", "mobilenetv2", "mobilenetv3large", "mobilenetv3small")  # the networks that have an --alpha
GLYPH_WEIGHTS = Path(__file__).resolve().parents[2] / "weights" / "mobilenetv2_0.35_glyphs.weights.h5"


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
