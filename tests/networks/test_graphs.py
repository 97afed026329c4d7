"""The order of the operations of a traced graph."""

import keras
from conftest import BATCH, CLASSES, SIZE
from small_networks import built_optimizer

from elastic_trainer.engine.step import TrainStep
from elastic_trainer.engine.task import ImageClassification
from elastic_trainer.networks.graphs import inputs_first
from elastic_trainer.networks.tensors import all_mask

layers = keras.layers


def is_in_order(operations):
    """Whether each operation comes after all that it depends on."""
    seen: set[str] = set()
    for op in operations:
        if not {*(tensor.op.name for tensor in op.inputs), *(control.name for control in op.control_inputs)} <= seen:
            return False
        seen.add(op.name)
    return True


def test_each_operation_comes_after_its_inputs_even_where_a_loop_was_given_more_later():
    inputs = keras.Input((SIZE, SIZE, 3))
    x = layers.GRU(4)(layers.Reshape((SIZE, SIZE * 3))(inputs))
    model = keras.Model(inputs, layers.Dense(CLASSES)(x))
    graph = TrainStep(ImageClassification(model), built_optimizer("sgd", model), BATCH, all_mask(model)).graph
    assert not is_in_order(graph.get_operations())
    operations = inputs_first(graph)
    assert is_in_order(operations)
    assert sorted(op.name for op in operations) == sorted(op.name for op in graph.get_operations())
