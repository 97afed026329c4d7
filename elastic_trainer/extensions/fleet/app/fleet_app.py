"""The Flower app of a fleet, by whose name server and boards find each other.

Its code is in the processes `fleet.py serve` and `fleet.py join`, which take Flower's tasks themselves
(`elastic_trainer.extensions.fleet.runtime`): a board runs no code that somebody has sent.
"""

from __future__ import annotations

from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

client_app = ClientApp()
server_app = ServerApp()
