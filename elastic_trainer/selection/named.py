"""Schemes and importances by name (no TensorFlow here): plain dictionaries.

Other programs add their own: `SCHEMES["mine"] = SchemeEntry(make, "Mine", "…")`. The parser, figures and docs/flags.md
read them. Modules that need TensorFlow are imported inside functions, when they are first used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from elastic_trainer.system.errors import UserError, not_one_of


def _importance() -> Any:
    from elastic_trainer.selection import importance

    return importance


def _schemes() -> Any:
    from elastic_trainer.selection import schemes

    return schemes


def _select() -> Any:
    from elastic_trainer.selection import select

    return select


def _tensors() -> Any:
    from elastic_trainer.networks import tensors

    return tensors


def _prunetrain(context: Any) -> Any:
    from elastic_trainer.selection.pruning.scheme import prunetrain

    return prunetrain(context)


# Task and batch size -> `selection.importance.ImportanceEvaluator`.
IMPORTANCES: dict[str, Callable[..., Any]] = {
    "gain": lambda *args: _importance().ImportanceEvaluator(*args),
    "weight_magnitude": lambda *args: _importance().WeightMagnitude(*args),
    "grad_magnitude": lambda *args: _importance().GradientMagnitude(*args),
    "random": lambda *args: _importance().Random(*args),
}

# --- schemes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SchemeEntry:
    """A scheme: it decides which tensors train."""

    make: Callable[[Any], Any]  # `selection.schemes.SchemeContext` -> `selection.schemes.Scheme`
    label: str  # in figures
    trains: str  # text for docs/flags.md on which tensors it trains
    # Model and `trained_layers` -> bool [N] over `model.trainable_variables`: all that it may ever train.
    mask: Callable[[Any, int], Any] | None = None
    is_elastic: bool = False  # it selects tensors within a time budget, which needs a timing table
    importance: str | None = None  # by which it selects
    takes_steps: bool = True  # it trains step by step, with the settings of the preset
    can_split: bool = True  # it can take a batch in parts


def elastic(
    label: str, trains: str, importance: str | None = "gain", select: Callable[..., Any] | None = None
) -> SchemeEntry:
    """Elastic training by an importance or without one; `select` replaces the Tensor Selector `select_tensors`."""

    def make(context: Any) -> Any:
        from elastic_trainer.selection.elastic import ElasticScheme

        evaluator = None if importance is None else IMPORTANCES[importance]
        selector = select or _select().select_tensors
        return ElasticScheme(context, evaluator, selector)

    return SchemeEntry(make, label, trains, is_elastic=True, importance=importance)


def _fixed(label: str, trains: str, mask: Callable[[Any, int], Any]) -> SchemeEntry:
    """The same tensors from start to end."""

    def make(context: Any) -> Any:
        return _schemes().FixedScheme(mask(context.task.model, context.settings.trained_layers))

    return SchemeEntry(make, label, trains, mask)


def _all(model: Any, layers: int = 0) -> Any:
    return _tensors().all_mask(model)


def _head(model: Any, layers: int = 0) -> Any:
    return _tensors().head_mask(model)


SCHEMES: dict[str, SchemeEntry] = {
    "full_training": _fixed("Full training", "every tensor", _all),
    "traditional_tl_training": _fixed("Traditional TL", "the head alone (transfer learning)", _head),
    "closed_form_head": SchemeEntry(
        lambda context: _schemes().ClosedFormScheme(context),
        "Closed-form head",
        "the head, without gradients: a linear discriminant of the features below it, from one forward pass",
        _head,
        takes_steps=False,
        can_split=False,
    ),
    "bn_plus_bias_training": _fixed(
        "BN+Bias",
        "scales and shifts of normalisation, biases, and the head",
        lambda model, _: _tensors().normalisation_and_bias_mask(model),
    ),
    "last_layers_training": _fixed(
        "Last layers",
        "the last layers (paper, Fig 2)",
        lambda model, layers: _tensors().last_layers_mask(model, layers),
    ),
    "elastic_training": elastic("ElasticTrainer", "tensors selected by importance"),
    "elastic_training_weight_magnitude": elastic(
        "Weight magnitude", "tensors selected by the magnitude of weights (paper, Fig 20)", "weight_magnitude"
    ),
    "elastic_training_grad_magnitude": elastic(
        "Gradient magnitude", "tensors selected by the magnitude of gradients (paper, Fig 20)", "grad_magnitude"
    ),
    "elastic_training_random": elastic(
        "Random tensors", "tensors selected by random importances: a baseline", "random"
    ),
    "elastic_training_upper_part": elastic(
        "Upper part",
        "all tensors from the output down to the deepest one within the time budget; importance is not measured",
        None,
        lambda *args: _select().select_upper_part(*args),
    ),
    "prunetrain": SchemeEntry(
        _prunetrain,
        "PruneTrain",
        "every tensor, while channels are removed ([PruneTrain](prunetrain.md))",
        can_split=False,
    ),
}


def find_scheme(name: str) -> SchemeEntry:
    """The entry called `name`. Raises `UserError` if there is none."""
    if name not in SCHEMES:
        raise UserError(f"--train_type: {not_one_of(name, [*SCHEMES])}")
    return SCHEMES[name]


def trainable_mask(train_type: str, model: Any, trained_layers: int) -> Any:
    """Bool [N] over `model.trainable_variables`: all that a scheme may ever train."""
    return (find_scheme(train_type).mask or _all)(model, trained_layers)
