"""SGD with decoupled weight decay, and Adam, each with one fused update per tensor.

The paper trains with tensorflow-addons' SGDW: learning rate and weight decay both follow one cosine schedule, so that
each step takes `w <- w - lr_t*wd*w` and then a momentum step (Loshchilov & Hutter, arXiv 1711.05101). Keras 3 writes
the same update as five or more small operations per tensor, which take a large part of a step on a small network with
150 tensors. TensorFlow's fused kernels need one operation (two with weight decay).

A tensor without a gradient is not updated: neither its weights nor its optimizer state change while it is not selected.

Bounded updates: with frozen batch norm, single batches may have gradients a hundred times larger than most, above all
in the shifts after linear bottlenecks, and a pretrained network does not recover from them. Adaptive gradient clipping
(Brock et al., 2021, arXiv 2102.06171, section 4) bounds the norm of each gradient by a share of its weights' norm.
There, a norm is that of one output channel. Here it is that of the tensor, which takes a tenth of the operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from elastic_trainer.networks.tensors import head_mask
from elastic_trainer.settings import OPTIMIZERS, Settings
from elastic_trainer.system.errors import UserError, not_one_of

MIN_NORM = 1e-3  # of weights, so that those which start at 0 can train (as in the paper of adaptive clipping)


@keras.saving.register_keras_serializable(package="elastic_trainer")
class SGDW(keras.optimizers.SGD):
    """SGD with momentum and decoupled weight decay, which follows the learning-rate schedule and skips the momentum.

    Args:
        learning_rate: float or Keras schedule.
        momentum: factor of the previous update.
        decoupled_weight_decay: wd in `w <- w - lr_t*wd*w`, per unit of learning rate.
        clipping: bound of a gradient's norm over that of its weights; None: there is none.
        unclipped: positions of the variables without a bound, among those it is built for.
    """

    def __init__(
        self,
        learning_rate: Any = 1e-4,
        momentum: float = 0.9,
        decoupled_weight_decay: float = 0.0,
        clipping: float | None = None,
        unclipped: Sequence[int] = (),
        name: str = "SGDW",
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate=learning_rate, momentum=momentum, name=name, **kwargs)
        self.decoupled_weight_decay, self.clipping, self.unclipped = decoupled_weight_decay, clipping, [*unclipped]

    def update_step(self, gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        """Apply one update to one variable in place."""
        rate = tf.cast(learning_rate, variable.dtype)
        gradient = tf.cast(tf.convert_to_tensor(gradient), variable.dtype)
        index, decay = self._get_variable_index(variable), rate * self.decoupled_weight_decay
        if self.clipping is not None and index not in self.unclipped:
            rate *= _clipping_factor(gradient, variable, self.clipping)  # cheaper than to scale the gradient
        if self.decoupled_weight_decay:
            variable.assign_sub(variable * decay)
        slot = self.momentums[index].value
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
        names = ("decoupled_weight_decay", "clipping", "unclipped")
        return {**config, **{name: getattr(self, name) for name in names}}


def _clipping_factor(gradient: tf.Tensor, weights: tf.Variable, clipping: float) -> tf.Tensor:
    """What a gradient is multiplied by so that its norm is at most `clipping` times that of its weights; at most 1."""
    most = clipping**2 * tf.maximum(tf.nn.l2_loss(weights), MIN_NORM**2 / 2)
    return tf.minimum(tf.sqrt(most / tf.nn.l2_loss(gradient)), tf.ones((), gradient.dtype))


@keras.saving.register_keras_serializable(package="elastic_trainer")
class FusedAdam(keras.optimizers.Adam):
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


@keras.saving.register_keras_serializable(package="elastic_trainer")
class WarmupCosine(keras.optimizers.schedules.LearningRateSchedule):
    """A linear rise to `learning_rate` over the share `warmup` of `steps`, then cosine decay to 0.

    With a deadline, the share of its time that has passed counts, where that is larger than the share of steps.

    The first of n warm-up steps has 1/n of the rate, not 0, since importance is measured by updates at the present
    rate. Keras' CosineDecay has such a warm-up, too, but as a branch of every compiled step.
    """

    def __init__(self, learning_rate: float, steps: int, warmup: float = 0.0) -> None:
        self._arguments = (learning_rate, steps, warmup)
        self._rate, self._warmup = learning_rate, warmup
        self.warmup_steps = max(min(round(warmup * steps), steps - 1), 0)
        self.passed = tf.Variable(0.0, trainable=False)  # the share of the time; compiled steps follow

    def __call__(self, step: Any) -> tf.Tensor:
        steps, rise, step = self._arguments[1], self.warmup_steps, tf.cast(step, tf.float32)
        done = tf.clip_by_value((step - rise) / max(steps - rise, 1), 0, 1)
        done = tf.maximum(done, (self.passed - self._warmup) / max(1 - self._warmup, 1e-6))
        decayed = self._rate * 0.5 * (1 + tf.cos(np.pi * done))
        if rise == 0:
            return decayed
        risen = tf.maximum(self._rate * (step + 1) / rise, self._rate * self.passed / self._warmup)
        return tf.where((step < rise) & (self.passed < self._warmup), risen, decayed)

    def get_config(self) -> dict[str, Any]:
        return dict(zip(("learning_rate", "steps", "warmup"), self._arguments, strict=True))


def make_optimizer(
    name: str,
    learning_rate: float,
    weight_decay: float,
    total_steps: int,
    clipping: float | None = None,
    unclipped: Sequence[int] = (),
    warmup: float = 0.0,
) -> keras.optimizers.Optimizer:
    """The optimizer of that name: "sgd" is `SGDW` with momentum 0.9 and `WarmupCosine`, "adam" has a constant rate and
    no decay. The paper's are sgd, and adam for ViT. Raises `UserError` if there is none of that name.
    """
    if name not in OPTIMIZERS:
        raise UserError(f"--optimizer: {not_one_of(name, [*OPTIMIZERS])}")
    if name == "adam":
        return FusedAdam(learning_rate)
    return SGDW(WarmupCosine(learning_rate, total_steps, warmup), 0.9, weight_decay, clipping, unclipped)


def optimizer_of(settings: Settings, total_steps: int, model: keras.Model) -> keras.optimizers.Optimizer:
    """The optimizer that `settings` ask for; it bounds no gradient of the model's head."""
    clipping, head = settings.gradient_clipping or None, np.flatnonzero(head_mask(model)).tolist()
    name, rate, decay = settings.optimizer, settings.learning_rate, settings.weight_decay
    return make_optimizer(name, rate, decay, total_steps, clipping, head, settings.warmup)


def unscaled(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """The optimizer itself, without the scaling of the loss that float16 needs."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def pass_time(optimizer: keras.optimizers.Optimizer, share: float) -> None:
    """Let the learning rate follow the share (0…1) of a deadline's time that has passed, if it is a `WarmupCosine`."""
    rate = unscaled(optimizer)._learning_rate
    if isinstance(rate, WarmupCosine):
        rate.passed.assign(min(share, 1.0))


def idle_optimizer(model: keras.Model, name: str, clips_gradients: bool = False) -> keras.optimizers.Optimizer:
    """An optimizer of the kind `name` at rate 0: every operation of a step runs, and no weight changes."""
    head = np.flatnonzero(head_mask(model)).tolist()
    optimizer = make_optimizer(name, 0.0, 5e-4, 1, clipping=1.0 if clips_gradients else None, unclipped=head)
    optimizer.build(model.trainable_variables)
    return optimizer
