#!/usr/bin/env python
"""Record the small trace that the tests read: tests/data/small_step.xplane.pb.

Three training steps of a network of a few layers, recorded on the CPU by the profiler's functions. Only what the reader
needs is kept: names and times of operations. Host names, Python events and the paths in them are removed.

    python tests/data/record_trace_fixture.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import keras
import tensorflow as tf

from elastic_trainer.engine.optimizers import make_optimizer
from elastic_trainer.engine.step import TrainStep
from elastic_trainer.engine.task import ImageClassification
from elastic_trainer.networks.batch_norm import freeze_batch_norm
from elastic_trainer.system.files import atomic_path
from elastic_trainer.timing.trace import is_operation, trace_step

TARGET = Path(__file__).with_name("small_step.xplane.pb")
STEPS, SIZE, CLASSES, BATCH = 3, 16, 3, 4


def small_network() -> keras.Model:
    """Two convolutions, frozen batch norm and the head: images [batch, 16, 16, 3] to logits [batch, 3]."""
    inputs = keras.Input((SIZE, SIZE, 3), name="image")
    x = keras.layers.Conv2D(4, 3, padding="same", use_bias=False, name="stem")(inputs)
    x = keras.layers.BatchNormalization(name="stem_bn")(x)
    x = keras.layers.ReLU(name="stem_relu")(x)
    x = keras.layers.Conv2D(8, 3, strides=2, padding="same", name="tail")(x)
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    outputs = keras.layers.Dense(CLASSES, name="head")(x)
    return freeze_batch_norm(keras.Model(inputs, outputs, name="small_classifier"))


def full_step(model: keras.Model) -> TrainStep:
    """A step that trains all of `model`, at learning rate 0, with batch norm as other programs compute it."""
    optimizer = make_optimizer("sgd", 0.0, 5e-4, 1)
    optimizer.build(model.trainable_variables)
    return TrainStep(ImageClassification(model), optimizer, BATCH, fold=False)


def stripped(space: Any) -> Any:
    """`space` reduced to the operations of its CPU, each with its name, start and duration."""
    small = type(space)()
    for plane in space.planes:
        if not plane.name.startswith("/host:CPU"):
            continue
        kept = small.planes.add(name=plane.name)
        for line in plane.lines:
            events = [e for e in line.events if is_operation(plane.event_metadata[e.metadata_id].name)]
            if events:
                place = kept.lines.add(id=line.id, timestamp_ns=line.timestamp_ns - plane.lines[0].timestamp_ns)
            for event in events:
                key = event.metadata_id
                place.events.add(metadata_id=key, offset_ps=event.offset_ps, duration_ps=event.duration_ps)
                kept.event_metadata[key].id = key
                kept.event_metadata[key].name = plane.event_metadata[key].name
    return small


def main() -> None:
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    keras.utils.set_random_seed(0)
    step = full_step(small_network())
    batch = (tf.random.uniform((BATCH, SIZE, SIZE, 3), seed=0), tf.zeros((BATCH,), tf.int32))
    for _ in range(STEPS):
        step(*batch)
    with tempfile.TemporaryDirectory() as folder:
        trace = trace_step(lambda: step(*batch), STEPS, Path(folder))
        space = xplane_pb2.XSpace()
        space.ParseFromString(trace.read_bytes())
    with atomic_path(TARGET) as temporary:
        temporary.write_bytes(stripped(space).SerializeToString(deterministic=True))
    print(f"{TARGET}: {TARGET.stat().st_size} bytes")


if __name__ == "__main__":
    main()
