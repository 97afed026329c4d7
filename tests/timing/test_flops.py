"""Counted FLOPs, compared with the literature, TensorFlow's registry, and arithmetic by hand."""

import keras
import pytest
import tensorflow as tf
from conftest import NEEDS_VIT
from tensorflow.python.framework import ops
from tensorflow.python.profiler.internal import flops_registry  # noqa: F401  # fills TensorFlow's registry

import models
from elastic_trainer.timing.flops import contraction_flops, count_flops


def graph_of(function, *shapes):
    return tf.function(function).get_concrete_function(*(tf.TensorSpec(shape) for shape in shapes)).graph


@pytest.mark.parametrize(
    # Keras' ResNet50 halves the size in the first 1×1 convolution of a block; 4.1, which is often quoted, is for the
    # variant that halves it in the 3×3 convolution.
    ("name", "gmacs"),
    [("resnet50", 3.86), ("mobilenetv2", 0.30), ("vgg16", 15.5), pytest.param("vit", 17.6, marks=NEEDS_VIT)],
)
def test_forward_flops_equal_the_literature(name, gmacs):
    model = models.build_model(name, 224, 1000, "none")
    graph = graph_of(lambda images: model(images, training=True), (1, 224, 224, 3))
    counted = sum(contraction_flops(op) or 0 for op in graph.get_operations()) / 2e9
    assert counted == pytest.approx(gmacs, rel=0.03)
    total = sum(count_flops(graph).values()) / 2e9
    assert counted < total < 1.1 * counted


def test_contraction_flops_equal_the_registry_of_tensorflow():
    kernel, depthwise, weights = (tf.Variable(tf.ones(shape)) for shape in ((3, 3, 8, 6), (3, 3, 6, 2), (12, 5)))

    def gradients(images):
        with tf.GradientTape() as tape:
            tape.watch(images)
            x = tf.nn.conv2d(images, kernel, 2, "SAME")
            x = tf.nn.depthwise_conv2d(x, depthwise, (1, 1, 1, 1), "SAME")
            x = tf.reshape(x, (2, -1, 12)) @ weights
            x = tf.einsum("bij,bkj->bik", x, x)
            x = tf.matmul(x, x, transpose_a=True)
            loss = tf.reduce_sum(tf.reshape(x, (32, 16)) @ tf.reshape(x, (16, 32)))
        return tape.gradient(loss, [images, kernel, depthwise, weights])

    graph = graph_of(gradients, (2, 8, 8, 8))
    first: dict[str, float] = {}
    both, seen, products = 0, set(), set()
    for op in graph.get_operations():
        flops = contraction_flops(op)
        if flops is None:
            continue
        seen.add(op.type)
        first.setdefault(op.type, flops)
        registered = ops.get_stats_for_node_def(graph, op.node_def, "flops").value
        transposed = op.type == "BatchMatMulV2" and (op.get_attr("adj_x") or op.get_attr("adj_y"))
        if transposed:  # TensorFlow sums over the wrong axis; [16, 12]ᵀ[16, 5] and [16, 16]ᵀ[16, 16], two of each
            products.add(flops)
        elif registered is not None:
            both += 1
            assert flops == registered, op.type
    assert both >= 6
    assert products == {2 * 2 * 12 * 5 * 16, 2 * 2 * 16**3}
    # TensorFlow does not count these: each gradient of a convolution costs as much as the convolution.
    assert first["DepthwiseConv2dNativeBackpropInput"] == first["DepthwiseConv2dNative"] == 2 * 3 * 3 * (2 * 4 * 4 * 12)
    assert first["DepthwiseConv2dNativeBackpropFilter"] == first["DepthwiseConv2dNative"]
    assert first["Conv2DBackpropInput"] == first["Conv2DBackpropFilter"] == first["Conv2D"]
    assert first["Einsum"] == 2 * 2 * 16 * 16 * 5
    assert seen >= {"Conv2D", "MatMul", "BatchMatMulV2", "Einsum"}


def test_einsum_with_an_ellipsis_counts_every_axis():
    left, right = tf.ones((3, 4, 5, 6)), tf.ones((6, 7))
    graph = graph_of(lambda x: tf.raw_ops.Einsum(inputs=[x, right], equation="...ij,jk->...ik"), left.shape)
    (op,) = (op for op in graph.get_operations() if op.type == "Einsum")
    assert contraction_flops(op) == 2 * 3 * 4 * 5 * 6 * 7


def test_other_operations_count_elements_and_unused_operations_nothing():
    def function(x):
        unused = x @ tf.transpose(x)
        return tf.reshape(x + x, (-1,)), tf.stop_gradient(unused)[:0]

    counted = {}
    graph = graph_of(lambda x: function(x)[0], (4, 5))
    for op in graph.get_operations():
        counted[op.type] = count_flops(graph)[op.name]
    assert counted["AddV2"] == 3 * 20 and counted["Reshape"] == 0
    assert counted["MatMul"] == 0, "no output needs it, so TensorFlow never runs it"


@pytest.mark.parametrize("layer", [keras.layers.GRU, keras.layers.LSTM])
def test_loop_flops_are_proportional_to_the_iterations(layer):
    def loops(length):
        model = keras.Sequential([keras.Input((length, 6)), layer(8)])
        weights = [variable.value for variable in model.trainable_variables]

        def gradients(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(x, training=True) ** 2)
            return tape.gradient(loss, weights)

        graph = graph_of(gradients, (2, length, 6))
        flops = count_flops(graph)
        return [flops[op.name] for op in graph.get_operations() if "While" in op.type]

    forward, backward = loops(5)
    # At least the product of 2 states [8] with the weights of all gates in each of five iterations, and twice that in
    # the backward pass.
    gates = {keras.layers.GRU: 3, keras.layers.LSTM: 4}[layer]
    assert forward > 5 * 2 * 2 * 8 * gates * 8 and backward > 2 * 5 * 2 * 2 * 8 * gates * 8
    assert loops(10) == pytest.approx([2 * forward, 2 * backward], rel=0.02)
