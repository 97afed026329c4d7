#!/usr/bin/env bash
# Remakes the figure or table of the paper that is named first; run_figure15.sh and the like call it. Runs
# that are complete are kept, a broken one goes on: started again after a power cut, it does what is left.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
extra_requirement=""
prepare_environment .venv constraints.txt requirements.txt
exec "$python" scripts/figures/run_figure.py "$@"
