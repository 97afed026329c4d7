"""What profile.json and table.csv of a timing table must hold. Imported when one is read: pydantic takes a while."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, RootModel, StringConstraints, model_validator

LONGEST_MS = 1e9  # eleven days a step: beyond any device, and far below what arithmetic loses

Milliseconds = Annotated[float, Field(ge=0, le=LONGEST_MS)]
MillisecondsAboveZero = Annotated[float, Field(gt=0, le=LONGEST_MS)]
Factor = Annotated[float, Field(ge=0, le=LONGEST_MS)]
Count = Annotated[int, Field(ge=0)]
Size = Annotated[int, Field(gt=0)]


class FitRecord(BaseModel):
    """`timing.fit.Fit`, field by field."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    constant_ms: Milliseconds
    t_dy_factor: Factor
    t_dw_factor: Factor
    t_fw_factor: Factor
    median_error_percent: Factor | None
    p95_error_percent: Factor | None
    selections: Count
    rounds: Count
    reading_factor: Factor
    writing_factor: Factor
    untraced_ms: Factor


class Place(BaseModel):
    """`machine.environment()`."""

    model_config = ConfigDict(extra="allow")

    packages: dict[str, Any] | None = None


class MemoryRecord(BaseModel):
    """`memory.costs.MemoryCosts`, field by field."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    forward_mb: Factor
    beside_mb: Factor
    two_parts_mb: Factor
    own_mb: list[Factor]
    chain_mb: list[Factor]
    kept: list[tuple[list[Count], Annotated[int, Field(ge=-1)], Factor]]


class PeaksRecord(BaseModel):
    """`memory.step_memory.MemoryPeaks`."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    predicted_mb: Annotated[list[Factor], Field(min_length=1)]
    measured_mb: list[Factor]

    @model_validator(mode="after")
    def _check_lengths(self) -> PeaksRecord:
        if len(self.predicted_mb) != len(self.measured_mb):
            raise ValueError("predicted_mb and measured_mb differ in length")
        return self


class Profile(BaseModel):
    """profile.json. What nothing reads is kept as it is."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model_name: str | None = None
    alpha: float | None = None
    input_size: Size | None = None
    num_classes: Size | None = None
    batch_size: Size | None = None
    optimizer: str
    mixed_precision: bool | None = None
    clips_gradients: bool = False
    forward_ms: Milliseconds
    preprocessing_ms: Milliseconds
    full_step_ms: MillisecondsAboveZero
    gradient_pass_ms: MillisecondsAboveZero
    fit: FitRecord
    compiling_ms: Milliseconds | None = None
    plain_step_ms: MillisecondsAboveZero | None = None
    profiling_seconds: MillisecondsAboveZero | None = None
    environment: Place | None = None
    graph_digest: str | None = None
    memory: MemoryRecord | None = None
    memory_peaks: PeaksRecord | None = None


class Row(BaseModel):
    """A row of table.csv, whose cells are text."""

    model_config = ConfigDict(allow_inf_nan=False)

    name: Annotated[str, StringConstraints(min_length=1)]
    shape: Annotated[str, StringConstraints(pattern=r"^(\d{1,9}(x\d{1,9})*)?$")]
    order: Count
    t_dw_ms: Milliseconds
    t_dy_ms: Milliseconds
    t_fw_ms: Milliseconds
    kernel: str = ""
    features_mb: Factor = 0.0

    @property
    def dimensions(self) -> tuple[int, ...]:
        """The tensor's shape; () of a scalar."""
        return tuple(int(size) for size in self.shape.split("x") if size)


class Rows(RootModel[dict[str, Row]]):
    """All rows of table.csv, by the line that they stand in."""

    @model_validator(mode="after")
    def _check_all(self) -> Rows:
        rows = [*self.root.values()]
        for column in ("name", "order"):
            seen: dict[Any, str] = {}
            for line, row in self.root.items():
                value = getattr(row, column)
                if value in seen:
                    raise ValueError(f"{line}: {column}: {value} is a duplicate of {seen[value]}")
                seen[value] = line
        if not any(row.t_dw_ms + row.t_dy_ms for row in rows):
            raise ValueError("holds no time above 0")
        return self
