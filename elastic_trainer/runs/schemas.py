"""What config.json and summary.json of a run must hold. Imported when one is read: pydantic takes a while.

What runs of the first version did not write is optional. Fields that nothing reads are kept as they are.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Name = Annotated[str, Field(pattern=r"^\w+$")]  # another program may have registered schemes and data sets of its own
Count = Annotated[int, Field(ge=0)]
CountAboveZero = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Quantity = Annotated[float, Field(ge=0)]


class Images(BaseModel):
    """The images that a run was started with, see `datasets.image_data.ImageData.record`."""

    model_config = ConfigDict(strict=True)

    class_names: list[str]
    digests: str | None = None
    training_images: str
    test_images: str
    held_out_images: str | None = None


class Network(BaseModel):
    """The custom network that a run was started with, see `runs.config.network_record`."""

    model_config = ConfigDict(strict=True)

    inference: str
    training: str
    precision: str
    made_with: str


class RunConfig(BaseModel):
    """config.json: the options of a run and what it was started with. Tests and older runs leave out any of them."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    command: list[str] = []
    model_name: str | None = None
    dataset_name: Name | None = None
    train_type: Name | None = None
    data_dir: str | None = None
    run_name: str | None = None
    weights: str | None = None
    alpha: Positive | None = None
    input_size: CountAboveZero | None = None
    num_classes: CountAboveZero | None = None
    batch_size: CountAboveZero | None = None
    skip_broken: bool | None = None
    test_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    seed: Count | None = None
    num_epochs: CountAboveZero | None = None
    max_steps: CountAboveZero | None = None
    importance_batches: CountAboveZero | None = None
    trained_layers: CountAboveZero | None = None
    environment: dict[str, Any] | None = None
    images: Images | None = None
    network: Network | None = None
    run_id: str | None = None


class Summary(BaseModel):
    """summary.json, see `runs.summary.run_results`."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model_name: str | None = None
    dataset_name: Name | None = None
    train_type: Name
    rho: Share | None = None
    epochs: CountAboveZero
    steps: CountAboveZero
    planned_steps: CountAboveZero | None = None
    start_accuracy: Share | None = None
    best_accuracy: Share
    best_epoch: Count | None = None
    final_accuracy: Share
    test_accuracy: Share | None = None
    train_seconds: Positive
    validation_seconds: Quantity
    selection_seconds: Quantity
    elapsed_seconds: Quantity | None = None
    wall_seconds: Quantity | None = None
    selection_percent: Quantity
    median_step_ms: Positive | None
    rho_measured: Positive | None = None
    time_over_full: Positive | None = None
    time_over_full_missing: str | None = None
    train_flops: Quantity | None = None
    memory_budget_mb: Quantity | None = None
    start_memory_mb: Quantity | None = None
    predicted_memory_mb: Quantity | None = None
    peak_memory_mb: Quantity | None = None
    gpu_peak_memory_mb: Quantity | None = None
    energy_joules: Quantity | None = None
    energy_missing: str | None = None
    training_spans: list[tuple[float, float]] | None = None
