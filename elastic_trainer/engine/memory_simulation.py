"""TensorFlow's threads and its allocator on a CPU, simulated: the memory that running a graph touches.

TensorFlow has a thread for each core. A thread runs the newest of the operations that it has made ready by what it ran
before; if there is none, it takes the oldest one of another thread. So while one runs the layers, others may make the
random masks of dropout, which depend on nothing. How long an operation takes is guessed from what it reads and writes.

TensorFlow with oneDNN keeps what is freed and gives it to later tensors (`BFCAllocator` in its source): memory comes in
regions of doubling size, a request takes the smallest free chunk that is large enough, and free neighbours are joined.
So what a process takes never shrinks, and it is more than the tensors that are alive together: a free chunk may be a
little too small. For MobileNetV2 at half depth that is half as much again (docs/log/memory.md).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterable
from math import prod
from typing import Any, NamedTuple

from elastic_trainer.system.machine import cores

SMALL = 1 << 18  # bytes; smaller requests go to the system's allocator
ALIGNED = 256
FIRST_REGION = 1 << 21
MAX_WASTE = 128 << 20  # a chunk with more to spare is split, as is one of twice the size
OPERATION_BYTES = 1000  # an operation takes as long as this many bytes more than it reads and writes
_GIVEN = {"Const", "Placeholder"}  # their memory is there before
# Their result is their first input.
_ALIASES = {"Identity", "IdentityN", "Reshape", "Squeeze", "ExpandDims", "ReadVariableOp", "StopGradient"}
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


def source(tensor: Any) -> Any:
    """The tensor whose memory `tensor` shares."""
    while tensor.op.type in _ALIASES and tensor.op.inputs:
        tensor = tensor.op.inputs[0]
    return tensor


def touched_bytes(operations: list[Any], results: Iterable[Any], threads: int | None = None) -> int:
    """Bytes that running all `operations` of a graph touches; the tensors `results` stay. Default: a thread a core."""
    memory = _Memory(operations, results)
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
            others = next((each for each in ready if each), None)
            if others is None:
                break
            op = ready[thread].pop() if ready[thread] else others.popleft()
            idle.remove(thread)
            memory.start(op)
            took = OPERATION_BYTES + sum(map(size_of, (*op.inputs, *op.outputs)))
            heapq.heappush(running, (now + took, thread, op))
        if not running:
            return memory.allocator.touched
        now, thread, op = heapq.heappop(running)
        idle.append(thread)
        memory.end(op)
        for other in after[op.name]:
            waiting[other.name] -= 1
            if not waiting[other.name]:
                ready[thread].append(other)


class _Memory:
    """What the tensors of `operations` take while these run."""

    def __init__(self, operations: list[Any], results: Iterable[Any]) -> None:
        self._readers = Counter(source(tensor).name for op in operations for tensor in op.inputs)
        self._readers.update(source(tensor).name for tensor in results)
        self._chunks: dict[str, tuple[int, Chunk]] = {}  # of what is there, by name, with its size
        self.allocator = Allocator()

    def start(self, op: Any) -> None:
        """Allocate what `op` writes."""
        read = [name for name in (source(tensor).name for tensor in op.inputs) if name in self._chunks]
        for tensor in () if op.type in _ALIASES | _GIVEN else op.outputs:
            size = size_of(tensor)
            free = (name for name in read if self._readers[name] == 1 and self._chunks[name][0] == size)
            over = next(free, None) if op.type in _IN_PLACE else None
            if over is not None:
                self._chunks[tensor.name] = self._chunks.pop(over)
            elif size:
                self._chunks[tensor.name] = size, self.allocator.allocate(size)

    def end(self, op: Any) -> None:
        """Free what nothing reads any more after `op`."""
        read = [source(tensor).name for tensor in op.inputs]
        self._readers.subtract(read)
        for name in {*read, *(tensor.name for tensor in op.outputs)}:
            if name in self._chunks and not self._readers[name]:
                self.allocator.free(self._chunks.pop(name)[1])


class Chunk(NamedTuple):
    """A part of a region; in this order free chunks are tried."""

    size: int
    region: int
    start: int


class Allocator:
    """What requests take, see the module's header."""

    def __init__(self) -> None:
        self._region_size = FIRST_REGION
        self._free: list[Chunk] = []  # ascending
        self._by_start: dict[tuple[int, int], Chunk] = {}  # the free ones, by region and start, and by region and end
        self._by_end: dict[tuple[int, int], Chunk] = {}
        self._tops: list[int] = []  # of each region: chunks are given from its start on, so it is touched up to here
        self._small = self._most_small = 0

    @property
    def touched(self) -> int:
        """Bytes that all requests so far have touched."""
        return sum(self._tops) + self._most_small

    def allocate(self, size: int) -> Chunk:
        """Memory of `size` bytes, above 0, until it is freed."""
        if size < SMALL:
            self._small += size
            self._most_small = max(self._small, self._most_small)
            return Chunk(size, -1, 0)
        size = -(-size // ALIGNED) * ALIGNED
        if not self._free or self._free[-1].size < size:
            self._add_region(size)
        found = self._take(self._free[bisect_left(self._free, (size,))])
        if found.size >= 2 * size or found.size - size >= MAX_WASTE:
            self._give(Chunk(found.size - size, found.region, found.start + size))
            found = found._replace(size=size)
        self._tops[found.region] = max(self._tops[found.region], found.start + size)
        return found

    def free(self, chunk: Chunk) -> None:
        """The memory that `allocate` returned may be used again."""
        size, region, start = chunk
        if region < 0:
            self._small -= size
            return
        if (region, start + size) in self._by_start:
            size += self._take(self._by_start[region, start + size]).size
        if (region, start) in self._by_end:
            before = self._take(self._by_end[region, start])
            size, start = before.size + size, before.start
        self._give(Chunk(size, region, start))

    def _give(self, chunk: Chunk) -> None:
        insort(self._free, chunk)
        self._by_start[chunk.region, chunk.start] = self._by_end[chunk.region, chunk.start + chunk.size] = chunk

    def _take(self, chunk: Chunk) -> Chunk:
        del self._free[bisect_left(self._free, chunk)]
        del self._by_start[chunk.region, chunk.start], self._by_end[chunk.region, chunk.start + chunk.size]
        return chunk

    def _add_region(self, size: int) -> None:
        is_large = size > self._region_size
        while self._region_size < size:
            self._region_size *= 2
        self._give(Chunk(self._region_size, len(self._tops), 0))
        self._tops.append(0)
        if not is_large:
            self._region_size *= 2
