#!/usr/bin/env bash
# The main steps on the handwritten digits, in about four minutes on two cores after the installation: profile the
# network, train it elastically, fully, and its head alone, then show a table and a figure. New runs of the demo replace
# its earlier ones.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
extra_requirement=""
prepare_environment .venv constraints.txt requirements.txt

logdir=logs/demo
echo "1/5 profiling: what does each tensor cost to train?"
"$python" profiler.py --logdir $logdir
schemes="elastic_training full_training traditional_tl_training"
number=2
for scheme in $schemes; do
  echo "$number/5 $scheme"
  "$python" main.py --train_type $scheme --logdir $logdir --run_name $scheme --overwrite
  number=$((number + 1))
done
echo "5/5 table and figure"
"$python" scripts/figures/plot.py curves $(printf "$logdir/%s " $schemes) --output figures/demo
echo "all curves: .venv/bin/tensorboard --logdir $logdir"
