"""The Flower app of a fleet, for `flwr run`. It needs a checkout of this repository on PYTHONPATH wherever it runs.

`fleet.py serve` and `fleet.py join` do the same in their own processes, and run no app that somebody has sent.
"""

from __future__ import annotations

import fleet
from elastic_trainer.extensions.fleet import flower_app

server_app = flower_app.server_app(fleet.serve)
client_app = flower_app.client_app(fleet.setup)
