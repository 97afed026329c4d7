#!/usr/bin/env bash
# A network that knows printed digits learns handwritten ones, elastically and fully, in about a minute on two cores
# after the installation: a table and a figure. Arguments are those of demo.py, such as --seed 1.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
extra_requirement=""
prepare_environment .venv constraints.txt requirements.txt
"$python" scripts/figures/demo.py "$@"
