#!/usr/bin/env bash
# Does elastic training save time in recurrent and attention networks? Digits, row by row, from random weights.
#
#   ./scripts/study/run_rows.sh [log folder]      # one core a run, two side by side; finished runs are kept
set -euo pipefail
cd "$(dirname "$0")/../.."
logs=${1:-logs/rows}
python=.venv/bin/python
export TF_NUM_INTRAOP_THREADS=1 TF_NUM_INTEROP_THREADS=1 TF_CPP_MIN_LOG_LEVEL=3

network_flags() {
  echo "--model_name scripts/study/row_models.py:$1 --weights none --input_size 32 --optimizer adam --logdir $logs"
}

train() { # network, core, then flags of main.py
  local network=$1 core=$2
  shift 2
  taskset -c "$core" $python main.py $(network_flags "$network") --learning_rate 1e-3 --augment none --num_epochs 40 \
    --resume "$@" >> "$logs/$network.$core.log" 2>&1
}

mkdir -p "$logs"
for network in gru vit; do
  taskset -c 0 $python profiler.py $(network_flags $network) > "$logs/$network.profile.log" 2>&1
  for seed in 0 1 2; do
    train $network 0 --train_type full_training --seed $seed --run_name ${network}_full_$seed &
    train $network 1 --train_type elastic_training --rho 0.5 --interval 5 --seed $seed --run_name ${network}_elastic_$seed
    wait $!
  done
done
PYTHONPATH=scripts/study $python - "$logs" << 'PYTHON'
import json
import sys
from pathlib import Path

import numpy as np
from results_page import spread

for network in ("gru", "vit"):
    for scheme in ("full", "elastic"):
        folders = [Path(sys.argv[1]) / f"{network}_{scheme}_{seed}" for seed in range(3)]
        runs = [json.loads((folder / "summary.json").read_text()) for folder in folders]
        accuracies, seconds = (np.array([run[name] for run in runs]) for name in ("final_accuracy", "train_seconds"))
        print(f"| {network} | {scheme} | {spread(100 * accuracies)} % | {spread(seconds, 0)} s |")
PYTHON
