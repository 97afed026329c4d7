"""SGD with decoupled weight decay, and Adam, each with one fused update per tensor.

The paper trains with tensorflow-addons' SGDW: learning rate and weight decay both follow one cosine schedule, so that
each step takes `w <- w - lr_t*wd*w` and then a momentum step (Loshchilov & Hutter, arXiv 1711.05101). Keras 3 writes
the same update as five or more small operations per tensor, which take a large part of a step on a small network with
150 tensors. TensorFlow's fused kernels need one operation (two with weight decay).

A tensor without a gradient is not updated: neither its weights nor its optimizer state change while it is not selected.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf


class _OneDevice:
    """Applies updates variable by variable, without Keras' reduction over replicas.

    At every trace, that reduction registers a custom gradient in a global table, which keeps the graph in memory: each
    new selection would leak the graph of the previous one (10 MB for MobileNetV2).
    """

    def apply(self: Any, grads: list[tf.Tensor | None], trainable_variables: list[keras.Variable]) -> None:
        """Update each variable that has a gradient, and count the step. The optimizer must be built."""
        rate = self.learning_rate
        for gradient, variable in zip(grads, trainable_variables, strict=True):
            if gradient is not None:
                self.update_step(gradient, variable.value, rate)
        self.iterations.assign_add(1)


@keras.saving.register_keras_serializable(package="elastic_trainer")
class SGDW(_OneDevice, keras.optimizers.SGD):
    """SGD with momentum and decoupled weight decay, which follows the learning-rate schedule and skips the momentum.

    Args:
        learning_rate: float or Keras schedule.
        momentum: factor of the previous update.
        decoupled_weight_decay: wd in `w <- w - lr_t*wd*w`, per unit of learning rate.
    """

    def __init__(
        self,
        learning_rate: Any = 1e-4,
        momentum: float = 0.9,
        decoupled_weight_decay: float = 0.0,
        name: str = "SGDW",
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate=learning_rate, momentum=momentum, name=name, **kwargs)
        self.decoupled_weight_decay = decoupled_weight_decay

    def update_step(self, gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        """Apply one update to one variable in place."""
        rate = tf.cast(learning_rate, variable.dtype)
        gradient = tf.cast(tf.convert_to_tensor(gradient), variable.dtype)
        if self.decoupled_weight_decay:
            variable.assign_sub(variable * (rate * self.decoupled_weight_decay))
        slot = self.momentums[self._get_variable_index(variable)].value
        tf.raw_ops.ResourceApplyKerasMomentum(
            var=variable.handle,
            accum=slot.handle,
            lr=rate,
            grad=gradient,
            momentum=tf.constant(self.momentum, variable.dtype),
        )

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        config.pop("nesterov", None)
        return {**config, "decoupled_weight_decay": self.decoupled_weight_decay}


@keras.saving.register_keras_serializable(package="elastic_trainer")
class FusedAdam(_OneDevice, keras.optimizers.Adam):
    """keras.optimizers.Adam with TensorFlow's fused kernel, and a separate step count for each tensor.

    Bias correction depends on how often the averages of a tensor were updated. With one common step count, as in Keras,
    the first updates of a tensor that is first selected at step 1,000 would be several times too large, because its
    averages start at 0.
    """

    def build(self, variables: list[keras.Variable]) -> None:
        """Create both moving averages and the step count of every variable."""
        if self.built:
            return
        super().build(variables)
        self._steps = [
            self.add_variable((), initializer="zeros", dtype="float32", name=f"steps_{index}")
            for index in range(len(variables))
        ]

    def update_step(self, gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        """Apply one update to one variable in place."""
        dtype = variable.dtype
        index = self._get_variable_index(variable)
        step = tf.cast(self._steps[index].value.assign_add(1.0), dtype)
        beta_1, beta_2 = tf.constant(self.beta_1, dtype), tf.constant(self.beta_2, dtype)
        tf.raw_ops.ResourceApplyAdam(
            var=variable.handle,
            m=self._momentums[index].value.handle,
            v=self._velocities[index].value.handle,
            beta1_power=tf.pow(beta_1, step),
            beta2_power=tf.pow(beta_2, step),
            lr=tf.cast(learning_rate, dtype),
            beta1=beta_1,
            beta2=beta_2,
            epsilon=tf.constant(self.epsilon, dtype),
            grad=tf.cast(tf.convert_to_tensor(gradient), dtype),
        )


def make_optimizer(
    name: str, learning_rate: float, weight_decay: float, total_steps: int
) -> keras.optimizers.Optimizer:
    """The paper's optimizers (section 6): `sgd`, or `adam` for ViT.

    Under Keras' policy mixed_float16 the optimizer scales the loss, because small gradients would be 0 in float16.

    Args:
        name: "sgd" (SGDW, momentum 0.9, cosine decay to 0) or "adam" (constant learning rate, no weight decay).
        learning_rate: at the first step.
        weight_decay: of SGDW, per unit of learning rate.
        total_steps: after which cosine decay reaches 0.
    """
    if name == "adam":
        optimizer = FusedAdam(learning_rate)
    else:
        schedule = keras.optimizers.schedules.CosineDecay(learning_rate, decay_steps=total_steps)
        optimizer = SGDW(schedule, momentum=0.9, decoupled_weight_decay=weight_decay)
    return keras.optimizers.LossScaleOptimizer(optimizer) if in_float16() else optimizer


def in_float16() -> bool:
    """Whether new networks compute in float16."""
    return keras.config.dtype_policy().name == "mixed_float16"
