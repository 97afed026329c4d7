"""main.py with more checkpoints: `often.py MINUTES FLAG …`; 0 writes one after each step. A resumed run keeps this."""

from __future__ import annotations

import runpy
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from elastic_trainer.settings import PRESETS

if __name__ == "__main__":
    minutes = float(sys.argv.pop(1))
    PRESETS.update({name: replace(preset, checkpoint_minutes=minutes) for name, preset in PRESETS.items()})
    runpy.run_path(str(Path(sys.path[0]) / "main.py"), run_name="__main__")
