"""The memory of traced functions, counted by hand; and of steps, as their selections grow."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from elastic_trainer.engine.memory_simulation import touched_bytes
from elastic_trainer.engine.optimizers import idle_optimizer
from elastic_trainer.engine.step import TrainStep
from elastic_trainer.engine.step_memory import StepMemory, forward_memory, step_memory
from elastic_trainer.engine.task import ImageClassification
from elastic_trainer.networks.tensors import head_mask

MB = 1 << 20
SIDE = 512  # a matrix of float32 takes 1 MB


def tensors_mb(function, *shapes):
    specs = [tf.TensorSpec(shape, tf.float32) for shape in shapes]
    graph = tf.function(function, autograph=False).get_concrete_function(*specs).graph
    return step_memory(graph, []).tensors_mb * 1e6 / MB


def product(matrix, times):
    for _ in range(times):
        matrix = tf.matmul(matrix, matrix)
    return matrix


def test_a_chain_keeps_an_input_and_an_output_and_a_fork_keeps_more():
    square = (SIDE, SIDE)
    assert tensors_mb(lambda x: product(x, 5), square) == pytest.approx(2, abs=0.1)
    assert tensors_mb(lambda x: [product(x, 1) @ x for _ in range(3)], square) == pytest.approx(4, abs=0.1)
    assert tensors_mb(lambda x: tf.nn.relu(product(x, 1)), square) == pytest.approx(1, abs=0.1), "in place"

    def relu_of_a_kept_one(x):
        y = product(x, 1)
        return tf.nn.relu(y) @ y

    assert tensors_mb(relu_of_a_kept_one, square) == pytest.approx(3, abs=0.1)
    assert tensors_mb(lambda x: tf.reshape(product(x, 1), [-1]), square) == pytest.approx(1, abs=0.1), "the same memory"


def test_what_nothing_needs_is_not_run():
    def with_unneeded(x):
        for _ in range(20):
            tf.matmul(x, x)
        return product(x, 1)

    assert tensors_mb(with_unneeded, (SIDE, SIDE)) == pytest.approx(1, abs=0.1)


def test_one_thread_makes_a_random_mask_when_it_is_used_and_others_make_them_ahead():
    def with_masks(x):
        for _ in range(12):
            x = tf.matmul(x, x) * tf.random.uniform((SIDE, SIDE))
        return x

    spec = tf.TensorSpec((SIDE, SIDE), tf.float32)
    graph = tf.function(with_masks, autograph=False).get_concrete_function(spec).graph
    touched = [touched_bytes(graph.get_operations(), graph.outputs, threads) / MB for threads in (1, 2, 64)]
    assert touched == [pytest.approx(2, abs=0.1), pytest.approx(12, abs=0.1), pytest.approx(13, abs=0.1)]


def test_all_parts_add_up():
    whole = StepMemory(tensors_mb=100.0, operations=1000, filters_mb=10.0, trained_mb=5.0)
    for name in StepMemory._fields:
        assert whole._replace(**{name: 2 * getattr(whole, name)}).megabytes > whole.megabytes + 1


@pytest.fixture(scope="module")
def steps():
    """Of a chain of convolutions, by batch size and by how many of its 7 layers train, the last ones."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((48, 48, 3))
    x = inputs
    for _ in range(6):
        x = keras.layers.Conv2D(16, 3, padding="same", activation="relu")(x)
    model = keras.Model(inputs, keras.layers.Dense(3)(keras.layers.GlobalAveragePooling2D()(x)))
    optimizer, count = idle_optimizer(model, "sgd"), len(model.trainable_variables)

    def step(batch_size, layers):
        mask = np.arange(count) >= count - 2 * layers
        assert (mask | head_mask(model) == mask).all()
        return TrainStep(ImageClassification(model), optimizer, batch_size, mask)

    return step


def test_a_step_keeps_what_its_selection_reads(steps):
    """Each layer's output takes 48·48·16·4 bytes an image."""
    output_mb = 32 * 48 * 48 * 16 * 4 / 1e6
    found = [step_memory(step.graph, step.variables) for step in (steps(32, layers) for layers in (1, 3, 5, 7))]
    head, three, five, full = (each.tensors_mb / output_mb for each in found)
    assert head == pytest.approx(2, abs=0.3), "the input and the output of one layer"
    assert three == pytest.approx(4, abs=1) and five - three == pytest.approx(2, abs=0.5)
    assert full - five == pytest.approx(1, abs=0.5), "the first layer reads images"
    step = steps(32, 7)
    assert forward_memory(step.graph, step.loss).tensors_mb == pytest.approx(found[0].tensors_mb, rel=0.05)
    assert found[0].trained_mb < found[3].trained_mb and found[0].filters_mb == found[3].filters_mb


def test_tensors_grow_with_the_batch(steps):
    small, large = (step_memory(steps(size, 7).graph, []) for size in (16, 64))
    assert large.tensors_mb == pytest.approx(4 * small.tensors_mb, rel=0.1)
    assert large.operations == small.operations
