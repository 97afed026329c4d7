"""ElasticTraining in model.fit: it trains exactly what is selected, as Keras trains it, with everything fit offers."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import SIZE, make_small_model, make_table

from elastic_trainer import ElasticTraining
from elastic_trainer.networks.tensors import tensor_names

LOGITS_LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
RNG = np.random.default_rng(0)
IMAGES = RNG.uniform(0, 255, (40, SIZE, SIZE, 3)).astype(np.float32)
LABELS = (np.arange(40) % 3).astype(np.int32)


def compiled(optimizer=None, seed=0, **more):
    model = make_small_model(seed)
    model.compile(optimizer or keras.optimizers.SGD(0.05, momentum=0.9), LOGITS_LOSS, metrics=["accuracy"], **more)
    return model


def callback(model, **settings):
    """The callback with an invented timing table, whose selections do not follow the clock."""
    return ElasticTraining(
        **{"rho": 0.6, "interval": 1, "deterministic": True, "verbose": 0, **settings}, table=make_table(model)
    )


class Weights(keras.callbacks.Callback):
    """Keeps all weights at the start of each epoch and at the end."""

    def on_train_begin(self, logs=None):
        self.kept = []

    def on_epoch_begin(self, epoch, logs=None):
        self.kept.append([variable.numpy() for variable in self.model.variables])

    def on_train_end(self, logs=None):
        self.on_epoch_begin(0)


def moved(model, before, after):
    """Names of the variables that differ between two lists of all weights."""
    pairs = zip(model.variables, before, after, strict=True)
    return {variable.path for variable, old, new in pairs if not np.array_equal(old, new)}


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_exactly_the_selected_variables_move_over_three_selections(optimizer):
    model = compiled(keras.optimizers.get({"class_name": optimizer, "config": {"learning_rate": 0.01}}))
    elastic, weights = callback(model), Weights()
    model.fit(IMAGES, LABELS, batch_size=8, epochs=4, verbose=0, callbacks=[elastic, weights])
    masks = [selection.mask for selection in elastic.history.selections]
    assert len(masks) == 4 and len({mask.tobytes() for mask in masks}) > 1 and not any(mask.all() for mask in masks)
    random_states = {variable.path for variable in model.variables if "seed" in variable.path}
    for mask, before, after in zip(masks, weights.kept, weights.kept[1:], strict=False):
        chosen = {name for name, trains in zip(tensor_names(model), mask, strict=True) if trains}
        assert moved(model, before, after) - random_states == chosen


def sequence_examples():
    rng = np.random.default_rng(1)
    return rng.normal(size=(24, 6, 4)).astype(np.float32), rng.normal(size=(24, 2)).astype(np.float32)


def regression(optimizer=None):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((6, 4)), keras.layers.Conv1D(8, 3), keras.layers.GRU(5), keras.layers.Dense(2)]
    )
    model.compile(optimizer or keras.optimizers.AdamW(0.01), "mse", metrics=["mae"])
    return model, *sequence_examples()


def plain_descent():
    """Without dropout and a count of steps: at the end of a stream, Keras does both for a step that has no data."""
    return regression(keras.optimizers.SGD(0.05))


def several_outputs():
    keras.utils.set_random_seed(0)
    inputs = {"a": keras.Input((4,), name="a"), "b": keras.Input((3,), name="b")}
    x = keras.layers.Dense(6, "relu")(keras.layers.Concatenate()([*inputs.values()]))
    outputs = {
        "tags": keras.layers.Dense(3, "sigmoid", name="tags")(x),
        "value": keras.layers.Dense(1, name="value")(x),
    }
    model = keras.Model(inputs, outputs)
    losses = {"tags": "binary_crossentropy", "value": "mse"}
    model.compile(keras.optimizers.SGD(0.1), losses, loss_weights={"tags": 1.0, "value": 0.3}, metrics={"tags": "auc"})
    rng = np.random.default_rng(2)
    x = {"a": rng.normal(size=(24, 4)).astype(np.float32), "b": rng.normal(size=(24, 3)).astype(np.float32)}
    y = {"tags": rng.integers(0, 2, (24, 3)).astype(np.float32), "value": rng.normal(size=(24, 1)).astype(np.float32)}
    return model, x, y


class Subclass(keras.Model):
    """Makes its variables when it is first called."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = (keras.layers.Dense(size) for size in (5, 4, 3))

    def call(self, inputs):
        product = self.first(inputs["a"])
        if inputs["b"] is not None:
            product *= self.first(inputs["b"])
        return self.last(self.middle(product))


def sequential_without_input():
    return keras.Sequential([keras.layers.Dense(size) for size in (5, 4, 3)])


@pytest.mark.parametrize(
    ("make", "x"),
    [
        (Subclass, {name: RNG.normal(size=(24, 6)) for name in "ab"}),
        (sequential_without_input, RNG.normal(size=(24, 6))),
    ],
)
def test_a_model_that_is_not_built_trains_as_one_that_is(make, x):
    trained = []
    for is_built in (True, False):
        keras.utils.set_random_seed(0)
        model = make()
        model.compile("sgd", LOGITS_LOSS)
        if is_built:
            model(x)
            table = make_table(model)
        elastic = ElasticTraining(rho=0.6, interval=1, deterministic=True, verbose=0, table=table)
        model.fit(x, LABELS[:24], batch_size=8, epochs=3, verbose=0, callbacks=[elastic])
        assert not elastic.history.selection.mask.all()
        trained.append(model.get_weights())
    for built, unbuilt in zip(*trained, strict=True):
        np.testing.assert_array_equal(built, unbuilt)


def lengths_that_differ():
    """Sequences as long as the longest of their batch, for a model of any length; without separate targets."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((None, 4))
    model = keras.Model(inputs, keras.layers.Dense(4)(keras.layers.Conv1D(5, 3, padding="same")(inputs)))
    model.compile("sgd", "mse")
    return model, None, None


def padded():
    x = sequence_examples()[0]
    parts = [x[:8], x[8:16, :4], x[16:, :5]]
    spec = tf.TensorSpec((None, None, 4))
    return tf.data.Dataset.from_generator(lambda: ((p, p) for p in parts), output_signature=(spec, spec)).repeat()


def images():
    return compiled(), IMAGES, LABELS


class Chunks(keras.utils.PyDataset):
    """Eight images a batch."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        part = slice(8 * index, 8 * index + 8)
        return IMAGES[part], LABELS[part]


def unknown_length(x=IMAGES, y=LABELS):
    return tf.data.Dataset.from_generator(
        lambda: ((x[i : i + 8], y[i : i + 8]) for i in range(0, len(x), 8)),
        output_signature=tuple(tf.TensorSpec((None, *part.shape[1:]), part.dtype) for part in (x, y)),
    )


def optional_inputs():
    keras.utils.set_random_seed(0)
    model, x = Subclass(), {"a": np.random.default_rng(3).normal(size=(24, 6)), "b": None}
    try:
        model(x)
    except AttributeError:  # of Keras 3.12
        pytest.skip("this Keras takes no None")
    model.compile("sgd", LOGITS_LOSS)
    return model, x, LABELS[:24]


def clipped_words():
    """Words as text; of embeddings, gradients are sparse. A kernel has a constraint."""
    keras.utils.set_random_seed(0)
    words = keras.layers.TextVectorization(output_sequence_length=3, vocabulary=["red", "green"])
    inputs = keras.Input((1,), dtype="string")
    h = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(4, 5)(words(inputs)))
    h = keras.layers.Dense(5, kernel_constraint=keras.constraints.MaxNorm(0.5))(h)
    model = keras.Model(inputs, keras.layers.Dense(3)(h))
    model.compile(keras.optimizers.Adam(0.1, clipnorm=0.1), LOGITS_LOSS)
    return model, tf.constant([["red green"], ["red"], ["blue red"]] * 8), LABELS[:24]


FITS: dict[str, tuple[Any, dict[str, Any]]] = {
    "images": (images, {"batch_size": 8}),
    "smaller last batch": (images, {"batch_size": 12}),
    "class weights": (images, {"batch_size": 8, "class_weight": {0: 1.0, 1: 3.0, 2: 0.5}}),
    "regression": (regression, {"batch_size": 8}),
    "sample weights": (regression, {"batch_size": 8, "sample_weight": np.linspace(0, 2, 24, dtype=np.float32)}),
    "several outputs": (several_outputs, {"batch_size": 8}),
    "unknown length": (plain_descent, {"x": lambda: unknown_length(*sequence_examples())}),
    "lengths that differ": (lengths_that_differ, {"x": padded, "steps_per_epoch": 3}),
    "PyDataset": (images, {"x": Chunks}),
    "optional inputs": (optional_inputs, {"batch_size": 8}),
    "words, clipping and a constraint": (clipped_words, {"batch_size": 8}),
}


@pytest.mark.parametrize("kind", FITS)
def test_with_all_tensors_selected_it_trains_and_reports_as_plain_fit(kind):
    make, arguments = FITS[kind]
    results = []
    for with_callback in (False, True):
        model, x, y = make()
        source = {"x": arguments["x"]()} if "x" in arguments else {"x": x, "y": y}
        more = {name: value for name, value in arguments.items() if name != "x"}
        callbacks = [callback(model, rho=1.0, scheme="elastic_training_upper_part")] if with_callback else []
        keras.utils.set_random_seed(3)
        history = model.fit(**source, **more, epochs=3, verbose=0, shuffle=False, callbacks=callbacks).history
        results.append((history, [variable.numpy() for variable in model.trainable_variables]))
    (plain, plain_weights), (elastic, weights) = results
    assert set(plain) == set(elastic)
    for name, values in plain.items():
        np.testing.assert_array_equal(elastic[name], values, err_msg=name)
    for expected, value in zip(plain_weights, weights, strict=True):
        np.testing.assert_array_equal(value, expected)


@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_callbacks_validation_and_schedules_of_keras_work_beside_it(steps_per_execution, tmp_path):
    schedule = keras.optimizers.schedules.CosineDecay(0.05, 20)
    model = compiled(keras.optimizers.SGD(schedule), steps_per_execution=steps_per_execution)
    elastic = callback(model)
    others = [
        keras.callbacks.EarlyStopping("val_loss", patience=1, min_delta=10.0),
        keras.callbacks.ModelCheckpoint(tmp_path / "model.keras"),
        keras.callbacks.CSVLogger(tmp_path / "log.csv"),
        keras.callbacks.TensorBoard(tmp_path / "events"),
    ]
    examples = {"x": IMAGES, "y": LABELS, "batch_size": 6, "validation_split": 0.4, "validation_batch_size": 8}
    history = model.fit(**examples, epochs=9, verbose=0, callbacks=[elastic, *others]).history
    assert len(history["val_accuracy"]) == 2, "early stopping ended it"
    assert int(model.optimizer.iterations.numpy()) == elastic.history.step == 8
    assert (tmp_path / "model.keras").is_file() and (tmp_path / "events" / "train").is_dir()
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 3


def test_every_third_epoch_selects_and_the_length_of_a_stream_is_learned(tmp_path):
    model = compiled()
    elastic = callback(model, interval=2)
    model.fit(unknown_length(), epochs=5, verbose=0, callbacks=[elastic])
    assert [selection.step for selection in elastic.history.selections] == [0, 10, 20]


def test_it_ends_with_its_fit_even_if_that_fails():
    model = compiled()

    class Failing(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise RuntimeError("power cut")

    elastic = callback(model)
    with pytest.raises(RuntimeError, match="power cut"):
        model.fit(IMAGES, LABELS, batch_size=8, verbose=0, callbacks=[elastic, Failing()])
    steps, weights = elastic.history.step, Weights()
    model.fit(IMAGES, LABELS, batch_size=8, verbose=0, callbacks=[weights])
    assert elastic.history.step == steps == 1
    assert moved(model, *weights.kept) >= set(tensor_names(model)), "plain fit trains all"
    model.fit(IMAGES, LABELS, batch_size=8, verbose=0, callbacks=[elastic])
    assert elastic.history.step == 5, "it starts again with each fit"
