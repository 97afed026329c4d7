"""Schemes and importances by name (no TensorFlow here): plain dictionaries.

Other programs add their own: `SCHEMES["mine"] = SchemeEntry(make, "Mine", "…")`. The parser, figures and docs/flags.md
read them. Modules that need TensorFlow are imported inside the functions, when they are first called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from elastic_trainer.system.errors import UserError, not_one_of


def _importance(name: str) -> Callable[..., Any]:
    """A class of `selection.importance`."""

    def make(*args: Any) -> Any:
        from elastic_trainer.selection import importance

        return getattr(importance, name)(*args)

    return make


# Task and batch size -> `selection.importance.ImportanceEvaluator`.
IMPORTANCES: dict[str, Callable[..., Any]] = {
    "gain": _importance("ImportanceEvaluator"),
    "weight_magnitude": _importance("WeightMagnitude"),
    "grad_magnitude": _importance("GradientMagnitude"),
    "random": _importance("Random"),
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
        from elastic_trainer.selection.importance import NoImportance
        from elastic_trainer.selection.select import select_tensors

        if importance is None:
            return ElasticScheme(context, NoImportance, select or select_tensors)
        more: dict[str, Any] = {"has_fillers": True} if context.settings.has_fillers else {}
        return ElasticScheme(context, IMPORTANCES[importance], partial(select or select_tensors, **more))

    return SchemeEntry(make, label, trains, is_elastic=True, importance=importance)


def _upper_part(*args: Any) -> Any:
    from elastic_trainer.selection.select import select_upper_part

    return select_upper_part(*args)


def _fixed(label: str, trains: str, mask: Callable[[Any, int], Any]) -> SchemeEntry:
    """The same tensors from start to end."""

    def make(context: Any) -> Any:
        from elastic_trainer.selection.schemes import FixedScheme

        return FixedScheme(mask(context.task.model, context.settings.trained_layers))

    return SchemeEntry(make, label, trains, mask)


def _mask(name: str, takes_layers: bool = False) -> Callable[[Any, int], Any]:
    """A function of `networks.tensors`, of a model and `trained_layers`."""

    def mask(model: Any, layers: int) -> Any:
        from elastic_trainer.networks import tensors

        return getattr(tensors, name)(model, *([layers] if takes_layers else []))

    return mask


_all, _head = _mask("all_mask"), _mask("head_mask")


def _closed_form(context: Any) -> Any:
    from elastic_trainer.selection.schemes import ClosedFormScheme

    return ClosedFormScheme(_head(context.task.model, 0), context.data)


def _prunetrain(context: Any) -> Any:
    from elastic_trainer.selection.pruning.scheme import prunetrain

    return prunetrain(context)


SCHEMES: dict[str, SchemeEntry] = {
    "full_training": _fixed("Full training", "every tensor", _all),
    "traditional_tl_training": _fixed("Traditional TL", "the head alone (transfer learning)", _head),
    "closed_form_head": SchemeEntry(
        _closed_form,
        "Closed-form head",
        "the head, without gradients: a linear discriminant of the features below it, from one forward pass",
        _head,
        takes_steps=False,
        can_split=False,
    ),
    "bn_plus_bias_training": _fixed(
        "BN+Bias",
        "scales and shifts of normalisation, biases, and the head",
        _mask("normalisation_and_bias_mask"),
    ),
    "last_layers_training": _fixed("Last layers", "the last layers (paper, Fig 2)", _mask("last_layers_mask", True)),
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
        _upper_part,
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
