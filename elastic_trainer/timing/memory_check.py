"""Whether training fits into memory, asked before images are read and anything is trained.

The step is traced and its memory predicted (`memory.step_memory`), unless there is so much memory that it surely fits.
The paper does not cover memory.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from math import inf, prod

import keras
import numpy as np

from elastic_trainer.datasets.batches import part_rows
from elastic_trainer.errors import UserError
from elastic_trainer.machine import available_memory_mb, has_gpu, resident_memory_mb
from elastic_trainer.memory.alternatives import Alternative, larger_limit, named, of_batch, of_parts, smaller_batch
from elastic_trainer.memory.step_memory import training_mb, variables_mb
from elastic_trainer.networks.layer_graph import nested_nodes
from elastic_trainer.networks.tensors import head_mask
from elastic_trainer.settings import NetworkSettings
from elastic_trainer.task import ImageClassification
from elastic_trainer.timing.measuring import idle_optimizer
from elastic_trainer.training.step import TrainStep

# More than a step was ever seen to take of the outputs of all layers, of the weights, and beside them (docs/memory.md).
OUTPUTS_FACTOR, WEIGHTS_FACTOR, BESIDE_MB = 4, 5, 500


class TracedSteps:
    """MB that steps of a network take, predicted from their graphs; each is traced once.

    Args:
        model: the network.
        network: its optimizer and clipping.
    """

    def __init__(self, model: keras.Model, network: NetworkSettings) -> None:
        self.model, self.network, self._known = model, network, dict[tuple[bytes, int, int], float]()

    def needed_mb(self, mask: np.ndarray, batch_size: int, micro_batch: int | None = None) -> float:
        """Of steps that train `mask`, bool [N] over `model.trainable_variables`, in parts of at most `micro_batch`."""
        rows, model = part_rows(batch_size, micro_batch), self.model
        key = mask.tobytes(), batch_size, rows
        if key not in self._known:
            optimizer = idle_optimizer(model, self.network.optimizer, self.network.clips_gradients)
            step = TrainStep(ImageClassification(model), optimizer, rows, mask, parts=batch_size // rows)
            self._known[key] = training_mb(step)[0]
            del step
            gc.collect()  # the graph, whose memory the next one takes
        return self._known[key]


def room_mb(limit_mb: float | None = None, freed_mb: float = 0.0) -> float:
    """MB that training may still take: of a limit for the whole process, and of what the machine has.

    `freed_mb` of what the process takes now was freed, and training takes it again.

    Infinity if the system does not report its memory, or if a GPU with memory of its own trains.
    """
    available_mb = available_memory_mb()
    if available_mb is None or has_gpu():
        return inf
    return freed_mb + min(available_mb, inf if limit_mb is None else limit_mb - (resident_memory_mb() or 0.0))


def check_limit(limit_mb: float | None) -> None:
    """Raise `UserError` if a limit is given and nothing here can keep to one."""
    if limit_mb is not None and (resident_memory_mb() is None or has_gpu()):
        raise UserError("--memory: needs a system that reports the memory of a process, and no GPU; leave it out")


def surely_fits(model: keras.Model, batch_size: int, room: float) -> bool:
    """Whether `room` MB are more than a step of `model` can take, whatever it trains."""
    outputs = [output for node in nested_nodes(model) for output in node.outputs]
    values = sum(prod(size or 1 for size in output.shape[1:]) for output in outputs)
    outputs_mb = 4 * batch_size * values / 1e6
    return OUTPUTS_FACTOR * outputs_mb + WEIGHTS_FACTOR * variables_mb(model.variables) + BESIDE_MB <= room


def fitting_size(
    model: keras.Model, needed: Callable[[int], float], batch_size: int, limit_mb: float | None = None
) -> int | None:
    """The largest of a batch, its half, quarter, … with which training fits; None if there is none.

    Args:
        model: what is trained.
        needed: MB that steps on batches, or on parts of a batch, of this size take.
        batch_size: of the whole batch.
        limit_mb: memory that the process may take in all.
    """
    room = room_mb(limit_mb)
    if surely_fits(model, batch_size, room):
        return batch_size
    now_mb = needed(batch_size)
    return batch_size if now_mb <= room else smaller_batch(needed, batch_size, now_mb, room)


def check_memory(
    steps: TracedSteps,
    needed: Callable[[int, int | None], float],
    count: int,
    limit_mb: float | None = None,
    what: str = "training",
    trains_less: str | None = None,
    micro_batch: int | None = None,
    can_split: bool = False,
    freed_mb: float = 0.0,
) -> None:
    """Raise `UserError` if `what` takes more memory than there is; it names what fits.

    Args:
        steps: of the network.
        needed: MB that a batch of a size, in parts of at most a second one, takes.
        count: images of a batch.
        limit_mb: memory that the process may take in all.
        what: in words.
        trains_less: flags that train what fits, if the head does; None: there are none.
        micro_batch: images of a part of a batch, at most; None: the batch is one part.
        can_split: whether a batch can be taken in (smaller) parts.
        freed_mb: as of `room_mb`.
    """
    model, network, room = steps.model, steps.network, room_mb(limit_mb, freed_mb)
    if surely_fits(model, count, room):
        return
    now_mb = needed(count, micro_batch)
    if now_mb <= room:
        return
    resident_mb, others = (resident_memory_mb() or 0.0) - freed_mb, list[Alternative | None]()
    if trains_less is not None and steps.needed_mb(head_mask(model), count, micro_batch) <= room:
        others.append(Alternative(inf, trains_less))
    others.append(of_batch(count, smaller_batch(lambda size: needed(size, micro_batch), count, now_mb, room)))
    rows = part_rows(count, micro_batch)
    others.append(of_parts(lambda size: needed(count, size), rows, now_mb, room, can_split))
    others.append(
        larger_limit(resident_mb + now_mb, limit_mb, resident_mb + room_mb(None, freed_mb), " and what the images take")
    )
    advice = named(others, "no batch fits; choose a smaller --input_size or network")
    limit = "" if limit_mb is None else f" (limit {limit_mb:,.0f} MB)"
    size = f"{network.input_size}×{network.input_size}"
    raise UserError(
        f"--batch_size {count}: {what} {network.model_name} on {count} images of {size} takes about {now_mb:,.0f} "
        f"MB more, and {max(room, 0):,.0f} MB are available{limit}; {advice}"
    )
