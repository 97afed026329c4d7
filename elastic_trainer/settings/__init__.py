"""The settings of a run. Flags, and the names of networks, are in the modules beside."""

from elastic_trainer.settings.settings import (
    ALL_FLAGS as ALL_FLAGS,
)
from elastic_trainer.settings.settings import (
    BEST_MODEL as BEST_MODEL,
)
from elastic_trainer.settings.settings import (
    CLIPPING as CLIPPING,
)
from elastic_trainer.settings.settings import (
    LAST_MODEL as LAST_MODEL,
)
from elastic_trainer.settings.settings import (
    MAIN_FLAGS as MAIN_FLAGS,
)
from elastic_trainer.settings.settings import (
    NETWORK as NETWORK,
)
from elastic_trainer.settings.settings import (
    OPTIMIZERS as OPTIMIZERS,
)
from elastic_trainer.settings.settings import (
    PRESETS as PRESETS,
)
from elastic_trainer.settings.settings import (
    PROFILER_FLAGS as PROFILER_FLAGS,
)
from elastic_trainer.settings.settings import (
    RATE as RATE,
)
from elastic_trainer.settings.settings import (
    RATE_BATCH as RATE_BATCH,
)
from elastic_trainer.settings.settings import (
    TABLE_RECORD as TABLE_RECORD,
)
from elastic_trainer.settings.settings import (
    TRAINED_IMAGES as TRAINED_IMAGES,
)
from elastic_trainer.settings.settings import (
    TRAINING as TRAINING,
)
from elastic_trainer.settings.settings import (
    Evaluation as Evaluation,
)
from elastic_trainer.settings.settings import (
    ProfileSettings as ProfileSettings,
)
from elastic_trainer.settings.settings import (
    Settings as Settings,
)
from elastic_trainer.settings.settings import (
    preset_table as preset_table,
)
from elastic_trainer.settings.settings import (
    rate_at as rate_at,
)
