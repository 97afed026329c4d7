"""What a network computes, as a digest: a timing table is of no use once a layer has another stride or activation."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import keras


def structure(model: keras.Model, batch_size: int) -> str:
    """A digest of the operations of a forward pass, as steps compute it, with their inputs, types and shapes.

    Names of operations do not count, and neither do the values of weights. It is the same in every process, with one
    TensorFlow and Keras.
    """
    from elastic_trainer.training.step import trace_forward_pass

    number: dict[str, int] = {}
    digest = hashlib.sha256()
    for op in trace_forward_pass(model, batch_size).graph.get_operations():
        inputs = [number[tensor.name] for tensor in op.inputs]
        outputs = [(tensor.dtype.name, str(tensor.shape)) for tensor in op.outputs]
        for tensor in op.outputs:
            number[tensor.name] = len(number)
        digest.update(f"{op.type} {inputs} {outputs}\n".encode())
    return digest.hexdigest()[:16]
