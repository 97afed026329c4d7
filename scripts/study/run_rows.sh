#!/usr/bin/env bash
# Does elastic training save time in recurrent and attention networks? Digits, row by row, from random weights.
#
#   ./scripts/study/run_rows.sh [log folder]      # one core a run, two side by side; finished runs are kept
#
# Writes docs/results/rows.csv; a table of docs/log/recurrent.md is made from it by results_page.py.
set -euo pipefail
cd "$(dirname "$0")/../.."
logs=${1:-logs/rows}
python=.venv/bin/python
export TF_NUM_INTRAOP_THREADS=1 TF_NUM_INTEROP_THREADS=1 TF_CPP_MIN_LOG_LEVEL=3

network_flags() {
  echo "--model_name scripts/study/study_networks.py:$1 --weights none --input_size 32 --optimizer adam --logdir $logs"
}

train() { # network, core, then flags of main.py
  local network=$1 core=$2
  shift 2
  taskset -c "$core" $python main.py $(network_flags "$network") --learning_rate 1e-3 --augment none --num_epochs 40 \
    --resume "$@" >> "$logs/$network.$core.log" 2>&1
}

mkdir -p "$logs"
budget="--rho 0.5 --interval 10"
for network in gru vit; do
  taskset -c 0 $python profiler.py $(network_flags $network) > "$logs/$network.profile.log" 2>&1
  for seed in 0 1 2; do
    train $network 0 --train_type full_training --seed $seed --run_name ${network}_full_$seed &
    train $network 1 --train_type elastic_training $budget --seed $seed --run_name ${network}_elastic_$seed
    train $network 1 --train_type elastic_training_upper_part $budget --seed $seed --run_name ${network}_upper_$seed
    wait $!
  done
done
$python - "$logs" << 'PYTHON'
import sys
from pathlib import Path

sys.path.insert(0, ".")
import utils
from elastic_trainer.runs.reader import read_run

columns = ["setting", "seed", "final_accuracy", "train_seconds", "commit", "tensorflow", "processor"]
rows = []
for network in ("gru", "vit"):
    for scheme in ("full", "elastic", "upper"):
        for seed in range(3):
            run = read_run(Path(sys.argv[1]) / f"{network}_{scheme}_{seed}")
            place, measured = run.config["environment"], [run.summary[name] for name in columns[2:4]]
            where = [place.get("commit"), place["packages"]["tensorflow"], place.get("processor")]
            rows.append([f"{network}, {scheme}", seed, *measured, *where])
utils.write_csv(Path("docs/results/rows.csv"), columns, rows)
PYTHON
