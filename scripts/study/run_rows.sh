#!/usr/bin/env bash
# Does elastic training save time in recurrent and attention networks? Digits, row by row, from random weights.
#
#   ./scripts/study/run_rows.sh [log folder]      # one core a run, two side by side; finished runs are kept
set -euo pipefail
cd "$(dirname "$0")/../.."
logs=${1:-logs/rows}
python=.venv/bin/python
export TF_NUM_INTRAOP_THREADS=1 TF_NUM_INTEROP_THREADS=1 TF_CPP_MIN_LOG_LEVEL=3

train() { # network, core, then flags of main.py
  local network=$1 core=$2
  shift 2
  taskset -c "$core" $python main.py $(flags "$network") --num_epochs 40 --resume "$@" >> "$logs/$network.$core.log" 2>&1
}

flags() {
  echo "--model_name scripts/study/row_models.py:$1 --weights none --input_size 32 --optimizer adam" \
    "--learning_rate 1e-3 --augment none --logdir $logs"
}

mkdir -p "$logs"
for network in gru vit; do
  taskset -c 0 $python profiler.py $(flags $network | sed 's/--learning_rate 1e-3 --augment none//') > "$logs/$network.profile.log" 2>&1
  for seed in 0 1 2; do
    train $network 0 --train_type full_training --seed $seed --run_name ${network}_full_$seed &
    train $network 1 --train_type elastic_training --rho 0.5 --interval 5 --seed $seed --run_name ${network}_elastic_$seed
    wait
  done
done
$python - "$logs" << 'PYTHON'
import json, statistics, sys
from pathlib import Path

for network in ("gru", "vit"):
    for scheme in ("full", "elastic"):
        runs = [json.loads((Path(sys.argv[1]) / f"{network}_{scheme}_{seed}" / "summary.json").read_text()) for seed in range(3)]
        accuracies = [100 * run["final_accuracy"] for run in runs]
        seconds = [run["train_seconds"] for run in runs]
        print(f"| {network} | {scheme} | {statistics.mean(accuracies):.1f} ± {statistics.stdev(accuracies):.1f} % "
              f"| {statistics.mean(seconds):.0f} ± {statistics.stdev(seconds):.0f} s |")
PYTHON
