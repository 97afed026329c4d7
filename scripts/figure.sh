#!/usr/bin/env bash
# Remakes a figure or table of the paper; the first word is its name. run_figure15.sh and the others call this script.
# Complete runs are kept and an interrupted run continues, so after a power cut just start it again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
extra_requirement=""
prepare_environment .venv constraints.txt requirements.txt
exec "$python" scripts/figures/run_figure.py "$@"
