"""What the signatures of a file for LiteRT do, in LiteRT: exactly what a step of TensorFlow does."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import models
from elastic_trainer.board.inference_file import inference_file
from elastic_trainer.board.signatures import TrainingFunctions, WeightedImages
from elastic_trainer.engine.optimizers import make_optimizer
from elastic_trainer.engine.step import TrainStep
from elastic_trainer.system.errors import UserError

BATCH, PART, CLASSES = 8, 4, 5
litert = pytest.importorskip("ai_edge_litert.interpreter", reason="ai-edge-litert is not installed")


def _runners(content: bytes, *names: str):
    """The signatures of a file in LiteRT, by name."""
    interpreter = litert.Interpreter(model_content=content, num_threads=1)
    return {name: interpreter.get_signature_runner(name) for name in names}


def _logits(inference, arrays, image):
    """What the file for inference predicts for an image [1, height, width, 3] with these arrays in their places."""
    content = bytearray(inference.content)
    for offset, array in zip(inference.offsets, arrays, strict=True):
        content[offset : offset + array.nbytes] = array.tobytes()
    interpreter = litert.Interpreter(model_content=bytes(content), num_threads=1)
    interpreter.allocate_tensors()
    interpreter.set_tensor(interpreter.get_input_details()[0]["index"], image)
    interpreter.invoke()
    return interpreter.get_tensor(interpreter.get_output_details()[0]["index"])


def test_training_in_parts_in_litert_gives_the_weights_of_tensorflow():
    model = models.build_model("mobilenetv2", 32, CLASSES, alpha=0.35)
    mask = np.zeros(len(model.trainable_variables), bool)
    mask[-14:] = True
    mask[-9] = False  # a tensor in between stays
    optimizer = make_optimizer("sgd", 0.05, 1e-3, 100, 0.05, [len(mask) - 1])
    optimizer.build(model.trainable_variables)
    trained = [variable for variable, trains in zip(model.trainable_variables, mask, strict=True) if trains]
    inference = inference_file(model, trained)
    functions = TrainingFunctions(model, optimizer, mask, PART, inference.arrays)
    runner = _runners(functions.litert_file(), *functions.traced)
    rng = np.random.default_rng(0)
    dropout = next(layer for layer in model.layers if isinstance(layer, keras.layers.Dropout))
    dropout.rate = 0.0
    step = TrainStep(WeightedImages(model), optimizer, BATCH, mask)
    slots = [optimizer.momentums[index] for index in np.flatnonzero(mask)]
    runner["start"]()
    first = [variable.numpy() for variable in model.trainable_variables]
    for _ in range(4):
        before = [variable.numpy() for variable in trained]
        images = rng.uniform(0, 255, (BATCH, 32, 32, 3)).astype(np.float32)
        labels = rng.integers(0, CLASSES, BATCH).astype(np.int32)
        weights = np.full(BATCH, 1 / BATCH, np.float32)
        rate = np.float32(keras.ops.convert_to_numpy(optimizer.learning_rate))
        expected = step(tf.constant(images), tf.constant(labels), tf.constant(weights))[0]
        found = 0.0
        for start in range(0, BATCH, PART):
            rows = slice(start, start + PART)
            features = runner["features"](images=images[rows])
            noise = {name: np.ones(shape, np.float32) for name, shape in noise_of(functions).items()}
            part = runner["gradients"](**features, labels=labels[rows], weights=weights[rows], **noise)
            found += float(part["loss"])
        runner["update"](rate=np.array([rate]))
        assert abs(found - expected) < 1e-5 * abs(expected)
        state = runner["state"]()
        for index, (variable, old) in enumerate(zip(trained, before, strict=True)):
            change, difference = variable.numpy() - old, state[f"weights_{index}"] - variable.numpy()
            assert np.linalg.norm(difference) < 1e-3 * np.linalg.norm(change), variable.path
        # The next step starts from the same weights: rounding grows tenfold in every few steps of any training.
        now = {f"weights_{index}": variable.numpy() for index, variable in enumerate(trained)}
        runner["load"](**now, **{f"momentum_{index}": slot.numpy() for index, slot in enumerate(slots)})
    moved = [not np.array_equal(old, now.numpy()) for old, now in zip(first, model.trainable_variables, strict=True)]
    assert moved == mask.tolist()

    image = rng.uniform(0, 255, (PART, 32, 32, 3)).astype(np.float32)
    expected_logits = model(image, training=False).numpy()
    logits = runner["infer"](**runner["features"](images=image))["logits"]
    np.testing.assert_allclose(logits, expected_logits, atol=0.02 * np.abs(expected_logits).max())

    arrays = runner["fill"]()
    found = _logits(inference, [arrays[f"array_{index}"] for index in range(len(arrays))], image[:1])
    np.testing.assert_allclose(found, logits[:1], atol=1e-4 * np.abs(logits).max())


class _Calls(keras.layers.Layer):
    """Calls a function of its inputs and a source of seeds while training."""

    def __init__(self, function):
        super().__init__()
        self.function, self.seeds = function, keras.random.SeedGenerator(1)
        self.unused, self.count = self.add_weight(), self.add_weight(trainable=False)

    def call(self, inputs, training=False):
        return self.function(self, inputs) if training else inputs


def noise_of(functions: TrainingFunctions) -> dict[str, list[int]]:
    """The shapes of the random numbers that a step takes."""
    inputs = functions.traced["gradients"].structured_input_signature[1]
    return {name: spec.shape for name, spec in inputs.items() if name.startswith(("random_", "normal_"))}


def _file_with(*layers) -> TrainingFunctions:
    """The file that trains a small network with these layers in its middle."""
    keras.utils.set_random_seed(0)
    parts = [keras.layers.Conv2D(4, 3), *layers, keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(CLASSES)]
    model = keras.Sequential([keras.Input((6, 6, 3)), keras.layers.Rescaling(1 / 255), *parts])
    optimizer = make_optimizer("sgd", 0.05, 1e-3, 100, 0.05, [])
    optimizer.build(model.trainable_variables)
    return TrainingFunctions(model, optimizer, np.ones(len(model.trainable_variables), bool), PART)


def test_random_numbers_of_a_step_are_its_inputs():
    functions = _file_with(
        keras.layers.RandomFlip(),
        keras.layers.GaussianDropout(0.5),
        keras.layers.GaussianNoise(0.5),
        keras.layers.SpatialDropout2D(0.5),
        _Calls(lambda layer, inputs: inputs + tf.random.normal((4,))),
        _Calls(lambda layer, inputs: inputs * tf.random.uniform((4,))),
    )
    shapes = noise_of(functions)
    kinds = [name[:6] for name in shapes]
    assert kinds.count("normal") == 3 and kinds.count("random") in (3, 4)  # RandomFlip of older Keras has two
    runner = _runners(functions.litert_file(), "start", "features", "gradients")
    runner["start"]()
    rng = np.random.default_rng(0)
    features = runner["features"](images=rng.uniform(0, 255, (PART, 6, 6, 3)).astype(np.float32))
    batch = {"labels": np.arange(PART, dtype=np.int32), "weights": np.full(PART, 1 / PART, np.float32)}
    usual = {name: rng.uniform(0.7, 0.9, shape).astype(np.float32) for name, shape in shapes.items()}
    others = [{**usual, name: usual[name] - np.float32(0.4)} for name in shapes]  # below the rate of dropout
    losses = [float(runner["gradients"](**features, **batch, **noise)["loss"]) for noise in (usual, *others, usual)]
    assert losses[0] == losses[-1] and losses[0] not in losses[1:-1]


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (lambda layer, inputs: inputs + tf.random.truncated_normal((4,)), "TruncatedNormal .*other results"),
        (lambda layer, inputs: tf.random.shuffle(inputs), "RandomShuffle .*other results"),
        (lambda layer, inputs: inputs + tf.function(lambda: tf.random.normal((4,)))(), "Normal .*other results"),
        (
            lambda layer, inputs: inputs + keras.random.truncated_normal((4,), seed=layer.seeds),
            "reads what a layer assigns",
        ),
        (
            lambda layer, inputs: inputs + tf.function(lambda: keras.random.normal((4,), seed=layer.seeds))(),
            "reads what a layer assigns",
        ),
        (lambda layer, inputs: (layer.count.assign_add(1.0), inputs * layer.count)[1], "reads what a layer assigns"),
        (keras.layers.SpectralNormalization(keras.layers.Conv2D(4, 3)), "reads what a layer assigns"),
        (keras.layers.Conv2D(4, 3, kernel_constraint="max_norm"), "kernel has a constraint"),
        (keras.layers.ConvLSTM1D(4, 1, return_sequences=True), "has no lists of tensors"),
    ],
)
def test_what_changes_from_step_to_step_is_refused(layer, message):
    with pytest.raises(UserError, match=f"--export: .*{message}"):
        _file_with(layer if isinstance(layer, keras.Layer) else _Calls(layer))


def test_a_variable_without_influence_on_the_loss_stays_as_it_is():
    layer = _Calls(lambda layer, inputs: inputs)
    functions = _file_with(layer)
    place = next(k for k, each in enumerate(functions.variables.sources) if each is layer.unused)
    runner = _runners(functions.litert_file(), "start", "features", "gradients", "update", "state")
    runner["start"]()
    images = np.random.default_rng(0).uniform(0, 255, (PART, 6, 6, 3)).astype(np.float32)
    before = runner["state"]()
    batch = {"labels": np.arange(PART, dtype=np.int32), "weights": np.full(PART, 1 / PART, np.float32)}
    runner["gradients"](**runner["features"](images=images), **batch)
    runner["update"](rate=np.full(1, 0.5, np.float32))
    after = runner["state"]()
    moved = [not np.array_equal(before[f"weights_{k}"], after[f"weights_{k}"]) for k in range(5)]
    assert moved == [k != place for k in range(5)]


def _gated(inputs):
    """A squeeze-and-excite block whose hard sigmoid the converter merges with the bias before it."""
    gate = keras.layers.Dense(8, activation="hard_sigmoid")(keras.layers.GlobalAveragePooling2D()(inputs))
    return keras.layers.Multiply()([inputs, keras.layers.Reshape((1, 1, 8))(gate)])


def _attentive(inputs):
    rows = keras.layers.Reshape((-1, 8))(inputs)
    return keras.layers.Reshape((6, 6, 8))(keras.layers.MultiHeadAttention(2, 8)(rows, rows))


@pytest.mark.parametrize("block", [_gated, _attentive])
def test_the_file_for_inference_predicts_with_the_arrays_that_it_gets(block):
    keras.utils.set_random_seed(0)
    images = keras.Input((6, 6, 3))
    features = keras.layers.GlobalAveragePooling2D()(block(keras.layers.Conv2D(8, 3, padding="same")(images)))
    model = keras.Model(images, keras.layers.Dense(CLASSES)(features))
    trained = model.trainable_variables
    inference = inference_file(model, trained)
    rng = np.random.default_rng(1)
    for variable in trained:
        variable.assign(rng.normal(0, 0.5, variable.shape))
    image = rng.uniform(0, 1, (1, 6, 6, 3)).astype(np.float32)
    found = _logits(inference, [array.numpy() for array in inference.arrays()], image)
    np.testing.assert_allclose(found, model(image, training=False).numpy(), rtol=1e-4, atol=1e-4)
