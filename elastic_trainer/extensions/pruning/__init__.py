"""PruneTrain: a scheme that trains every tensor, and removes channels meanwhile."""

from elastic_trainer.registry import SCHEMES, Lazy, SchemeEntry

SCHEMES.add(
    "prunetrain",
    SchemeEntry(
        Lazy("elastic_trainer.extensions.pruning.scheme:prunetrain"),
        "PruneTrain",
        "every tensor, while channels are removed ([PruneTrain](prunetrain.md))",
        ignores=("recipe",),
        excludes=("micro_batch",),
    ),
)
