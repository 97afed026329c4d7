"""The order in which TensorFlow runs the operations of a graph, simulated, and the memory that they touch.

TensorFlow has a thread for each core. A thread runs the newest of the operations that it has made ready by what it ran
before; if there is none, it takes the oldest one of another thread. So while one runs the layers, others may make the
random masks of dropout, which depend on nothing. How long an operation takes is guessed from what it reads and writes.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable
from math import prod
from typing import Any

from elastic_trainer.machine import cores
from elastic_trainer.memory.allocator import Allocator, Chunk

OPERATION_BYTES = 1000  # an operation takes as long as so many bytes more than it reads and writes
# Their result is their first input.
ALIASES = {"Identity", "IdentityN", "Reshape", "Squeeze", "ExpandDims", "ReadVariableOp", "StopGradient"}
# They may write their result over an input that nothing else reads.
_IN_PLACE = {
    *("Relu", "Relu6", "BiasAdd", "AddV2", "Add", "AddN", "Sub", "Mul", "RealDiv", "Maximum", "Minimum", "SelectV2"),
    *("Relu6Grad", "ReluGrad", "SigmoidGrad", "TanhGrad", "Cast", "Neg", "Sigmoid", "Tanh", "Erf", "Exp", "Log", "Pow"),
    *("Softmax", "LogSoftmax", "Sqrt", "Rsqrt", "Square"),
}


def size_of(tensor: Any) -> int:
    """Bytes of a symbolic tensor; 0 if its shape is not known, and of what is no array."""
    if tensor.dtype.name in ("resource", "variant", "string") or not tensor.shape.is_fully_defined():
        return 0
    return prod(tensor.shape.as_list()) * tensor.dtype.size


class _Buffer:
    """Memory that some tensors share, and how many of their readers are left."""

    def __init__(self, size: int, chunk: Chunk) -> None:
        self.size, self.chunk, self.readers = size, chunk, 0


def touched_bytes(operations: list[Any], outputs: Iterable[Any], threads: int | None = None) -> int:
    """Bytes that running all `operations` of a graph touches; `outputs` stay.

    Args:
        operations: of one graph.
        outputs: tensors.
        threads: of the pool; None: one for each core.
    """
    memory = _Memory(operations, outputs)
    before = {op.name: {*(t.op.name for t in op.inputs), *(c.name for c in op.control_inputs)} for op in operations}
    after: dict[str, list[Any]] = {op.name: [] for op in operations}
    for op in operations:
        for name in before[op.name]:
            after[name].append(op)
    waiting = {name: len(names) for name, names in before.items()}
    ready = [deque[Any]() for _ in range(threads or cores())]  # of each thread, the newest last
    for place, op in enumerate(reversed([op for op in operations if not waiting[op.name]])):
        ready[place % len(ready)].append(op)
    idle, running, now = [*range(len(ready))], list[tuple[int, int, Any]](), 0
    while True:
        for thread in idle.copy():
            op = _next(ready, thread)
            if op is not None:
                idle.remove(thread)
                heapq.heappush(running, (now + OPERATION_BYTES + memory.start(op), thread, op))
        if not running:
            return memory.allocator.touched
        now, thread, op = heapq.heappop(running)
        idle.append(thread)
        memory.end(op)
        for other in after[op.name]:
            waiting[other.name] -= 1
            if not waiting[other.name]:
                ready[thread].append(other)


def _next(ready: list[deque[Any]], thread: int) -> Any:
    """The operation that this thread runs next; None if there is none."""
    if ready[thread]:
        return ready[thread].pop()
    return next((others.popleft() for others in ready if others), None)


class _Memory:
    """What the tensors of `operations` take while these run; arguments as of `touched_bytes`."""

    def __init__(self, operations: list[Any], outputs: Iterable[Any]) -> None:
        self._readers = Counter(tensor.name for op in operations for tensor in op.inputs)
        self._readers.update(tensor.name for tensor in outputs)
        self._buffers: dict[str, _Buffer] = {}
        self.allocator = Allocator()

    def start(self, op: Any) -> int:
        """Take memory for what `op` writes; bytes that it reads and writes."""
        read = self._read(op)
        for tensor in op.outputs:
            buffer = self._written(op, tensor, read)
            if buffer is not None:
                self._buffers[tensor.name] = buffer
                buffer.readers += self._readers[tensor.name]
        return sum(map(size_of, (*op.inputs, *op.outputs)))

    def end(self, op: Any) -> None:
        """Give back what nothing reads any more after `op`."""
        read = self._read(op)
        for buffer in read:
            buffer.readers -= 1
        written = [self._buffers[tensor.name] for tensor in op.outputs if tensor.name in self._buffers]
        for buffer in {id(one): one for one in (*read, *written)}.values():
            if not buffer.readers:
                self.allocator.give_back(buffer.chunk)

    def _read(self, op: Any) -> list[_Buffer]:
        return [self._buffers[tensor.name] for tensor in op.inputs if tensor.name in self._buffers]

    def _written(self, op: Any, tensor: Any, read: list[_Buffer]) -> _Buffer | None:
        """The memory of one of the outputs of `op`; None if it takes none."""
        if op.type in ALIASES and op.inputs:
            return read[0] if read else None
        size = 0 if op.type in ("Const", "Placeholder") else size_of(tensor)
        if not size:
            return None
        reused = (one for one in read if op.type in _IN_PLACE and one.size == size and one.readers == 1)
        return next(reused, None) or _Buffer(size, self.allocator.take(size))
