"""Whether training fits into memory, asked before images are read and anything is trained.

The full step is traced and its memory predicted by depth (`engine.memory`), unless there is so much memory that it
surely fits.
The paper does not cover memory.
"""

from __future__ import annotations

from math import prod

import keras
import numpy as np

from elastic_trainer.engine.memory import step_memory, variables_mb
from elastic_trainer.engine.optimizers import idle_optimizer
from elastic_trainer.engine.step import TrainStep
from elastic_trainer.engine.task import ImageClassification
from elastic_trainer.networks.graphs import graph_nodes, nested_graphs
from elastic_trainer.networks.tensors import head_mask
from elastic_trainer.settings import Settings
from elastic_trainer.system.machine import release_memory
from elastic_trainer.system.memory_budget import MemoryBudget, Needed, StepMemory, part_rows
from elastic_trainer.timing.attribution import attribute
from elastic_trainer.timing.fit import depth_of

# More than a step was ever seen to take of the outputs of all layers, of the weights, and beside them (docs/memory.md).
OUTPUTS_FACTOR, WEIGHTS_FACTOR, BESIDE_MB = 4, 5, 500


class TracedSteps:
    """MB that steps of `model` take, predicted from the graph of the full step, which is traced once.

    `settings` have its optimizer and clipping; `memory` is what they may take, by default what the machine has.
    """

    def __init__(self, model: keras.Model, settings: Settings, memory: MemoryBudget | None = None) -> None:
        self.model, self.settings, self.memory = model, settings, memory or MemoryBudget()
        self._traced: tuple[np.ndarray, StepMemory] | None = None  # with the backward order

    def certainly_fit(self, batch_size: int) -> bool:
        """Whether there is more than training on such a batch can take, whatever it trains; nothing is traced."""
        nodes = [node for graph in nested_graphs(self.model) for node in graph_nodes(graph)]
        values = sum(prod(size or 1 for size in output.shape[1:]) for node in nodes for output in node.outputs)
        weights_mb = variables_mb(self.model.variables)
        return self.memory.fits(OUTPUTS_FACTOR * 4e-6 * batch_size * values + WEIGHTS_FACTOR * weights_mb + BESIDE_MB)

    def needed_mb(self, mask: np.ndarray, batch_size: int, micro_batch: int | None = None) -> float:
        """Of steps that train `mask`, bool [N] over `model.trainable_variables`, in parts of at most `micro_batch`."""
        if self._traced is None:
            optimizer = idle_optimizer(self.model, self.settings.optimizer, self.settings.clips_gradients)
            full = TrainStep(ImageClassification(self.model), optimizer, part_rows(batch_size, micro_batch))
            found = attribute(full, self.model.trainable_variables)
            self._traced = found.positions, step_memory(full, found.places, found.positions)
            del full, found, optimizer
            release_memory()  # of the graph: training takes it again
        positions, memory = self._traced
        return float(memory.needed_mb(batch_size, micro_batch)[depth_of(mask[positions]) - 1])

    def check(
        self,
        needed: Needed,
        batch_size: int,
        micro_batch: int | None = None,
        can_split: bool = False,
        trains_less: str | None = None,
    ) -> None:
        """Raise `UserError` if training takes more memory than there is; it names what fits (`MemoryBudget.refuse`).

        `trains_less`: flags that train what fits, if the head does; None: there are none.
        """
        if self.certainly_fit(batch_size) or self.memory.fits(needed(batch_size, part_rows(batch_size, micro_batch))):
            return
        others, settings = [] if trains_less is None else [trains_less], self.settings
        if others and not self.memory.fits(self.needed_mb(head_mask(self.model), batch_size, micro_batch)):
            others = []
        what = f"training {settings.model_name} on {batch_size} images of {settings.input_size}×{settings.input_size}"
        beside = " and what the images take"
        raise self.memory.refuse(what, needed, batch_size, micro_batch, can_split, others, beside)
