"""The steps that benchmark_step.py compares: which tensors they train, and how a step of the same selection may run.

All steps are at learning rate 0, so no weight changes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import re
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from elastic_trainer.machine import load_tensorflow, text_of
from elastic_trainer.settings import PAPER
from elastic_trainer.timing.forward_costs import CACHED, COMPUTED

if TYPE_CHECKING:
    import keras

    from elastic_trainer.datasets.image_data import ImageData
    from elastic_trainer.settings import NetworkSettings
    from elastic_trainer.timing.table import TimingTable

VARIANTS = ("unfolded", "folded", "prefix", "cached")
STATUS = Path("/proc/self/status")


def variants_of(
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    mask: np.ndarray,
    data: ImageData,
    wanted: Sequence[str] = VARIANTS,
) -> dict[str, Callable[[], Any]]:
    """Calls that run the step of one selection, by variant; a variant that would be the same as another is left out.

    unfolded    batch norm runs as a layer
    folded      as main.py runs it without cached features
    prefix      the frozen prefix as inference, then the rest
    cached      the rest, from features that are cached in memory

    Args:
        model: the network.
        optimizer: built for all of its trainable variables.
        mask: bool [N] over `model.trainable_variables`.
        data: images for exactly one batch.
        wanted: of `VARIANTS`.
    """
    from elastic_trainer.task import ImageClassification
    from elastic_trainer.training.feature_cache import FeatureCache
    from elastic_trainer.training.prefix import Cut, SplitStep
    from elastic_trainer.training.step import TrainStep

    [batch] = data.train(0)
    images, labels = batch.inputs, batch.targets
    make = partial(TrainStep, ImageClassification(model), optimizer, data.batch_size, mask)
    step = make()
    cut = Cut(step)
    runs: dict[str, Callable[[], Any]] = {"folded": partial(step, images, labels)}
    if step.folded_pairs and "unfolded" in wanted:
        runs = {"unfolded": partial(make(fold=False), images, labels), **runs}
    if cut.tensors and {"prefix", "cached"} & {*wanted}:
        split = SplitStep(step, cut)
        runs["prefix"] = lambda: split(split.prefix(images), labels)
        if "cached" in wanted:
            with contextlib.suppress(ValueError):  # the features of an image depend on other images of its batch
                cache = FeatureCache(split, data, Path(tempfile.gettempdir()))
                cache.prepare(batch, data.order(0))
                keys = cache.keys(batch.order)
                runs["cached"] = lambda: split(cache.read(keys), labels)
    return runs


def made_up_images(network: NetworkSettings) -> ImageData:
    """One batch of random images."""
    from elastic_trainer.datasets.image_data import ImageData
    from elastic_trainer.datasets.images import DecodedImages

    rng = np.random.default_rng(0)
    shape = (network.batch_size, network.input_size, network.input_size, 3)
    labels = np.zeros(network.batch_size, np.int32)
    images = DecodedImages(rng.integers(0, 256, shape, np.uint8), labels, {})
    return ImageData("random", ["all"], images, images, network.batch_size)


def keras_step(model: keras.Model, network: NetworkSettings, data: ImageData) -> Callable[[], Any]:
    """A call that runs the step of `model.fit`: it trains everything, with frozen batch norm as a layer."""
    import keras

    optimizers = {"adam": keras.optimizers.Adam, "sgd": partial(keras.optimizers.SGD, momentum=0.9)}
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizers[network.optimizer](learning_rate=0.0), loss)
    [batch] = data.train(0)
    return partial(model.train_on_batch, batch.inputs, batch.targets)


def elastic_masks(
    model: keras.Model, network: NetworkSettings, table: TimingTable, rhos: Sequence[float]
) -> dict[str, np.ndarray]:
    """What is selected by the importance on one batch of digits: bool [N] for each feasible one of `rhos`.

    Steps without cached features decide. A rho that is too small for them allows steps from features that are cached.
    """
    import data
    from elastic_trainer.networks.tensors import head_mask
    from elastic_trainer.selection.importance import ImportanceEvaluator
    from elastic_trainer.selection.select import select_tensors
    from elastic_trainer.selection.time_budget import smallest_rho
    from elastic_trainer.task import ImageClassification
    from elastic_trainer.training.optimizers import make_optimizer

    optimizer = make_optimizer("sgd", PAPER["learning_rate"], PAPER["weight_decay"], 100)
    optimizer.build(model.trainable_variables)
    digits = data.load("digits", network.input_size, network.batch_size, network.seed)
    evaluator = ImportanceEvaluator(ImageClassification(model), network.batch_size)
    importance = evaluator(optimizer, digits.importance_batches(0))
    head, masks = head_mask(model), {}
    for rho in rhos:
        feasible = [use for use in (COMPUTED, CACHED) if rho >= smallest_rho(table, head, use.share)]
        if feasible:
            masks[f"rho {rho:g}"] = select_tensors(table, importance, head, rho, features=feasible[0]).mask
    return masks


def upper_masks(head: np.ndarray, positions: np.ndarray, shares: Sequence[float]) -> dict[str, np.ndarray]:
    """The tensors nearest the output: bool [N] for each share of all tensors, and for the head alone.

    Args:
        head: bool [N] over `model.trainable_variables`; part of every selection.
        positions: int [N], the tensors from the output on (`TimingTable.positions`).
        shares: of all tensors.
    """
    masks = {}
    for share in shares:
        mask = head.copy()
        mask[positions[: int(share * len(positions))]] = True
        masks[f"upper {share:.0%}".replace("%", " %")] = mask
    return {**masks, "head": head}


def peak_memory_mb(network: NetworkSettings, mask: np.ndarray, variant: str) -> float | None:
    """Memory in MB that three steps of one variant take beyond the network's weights, all that makes the step included.

    It is measured in a new process, since the peak of a process never falls. None if the system does not report it.

    Args:
        network: its settings.
        mask: bool [N] over `model.trainable_variables`.
        variant: one of `variants_of` this selection, or "keras".
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_own_peak_memory_mb, network, mask, variant).result()


def _own_peak_memory_mb(network: NetworkSettings, mask: np.ndarray, variant: str) -> float | None:
    load_tensorflow()

    import models
    from elastic_trainer.timing.measuring import idle_optimizer

    model = models.build(network)
    data = made_up_images(network)
    before_mb = _status_mb("VmRSS")
    if variant == "keras":
        run = keras_step(model, network, data)
    else:
        run = variants_of(model, idle_optimizer(model, network.optimizer), mask, data, [variant])[variant]
    for _ in range(3):
        run()
    # Not from `resource`: its peak includes that of the process which started this one.
    peak_mb = _status_mb("VmHWM")
    return peak_mb - before_mb if peak_mb is not None and before_mb is not None else None


def _status_mb(name: str) -> float | None:
    found = re.search(rf"^{name}:\s+(\d+) kB", text_of(STATUS), re.MULTILINE)
    return int(found[1]) * 1024 / 1e6 if found else None
