#!/usr/bin/env bash
# A fleet on this machine, in at most four minutes on two quiet cores after the installation: a server and three boards,
# of which one pretends to be 5 and one 15 times slower. Each board lacks some of the handwritten digits, and the slowest
# alone has the rare ones. Then the same boards in a simulation, by other rules. It ends with three tables and a figure.
# New runs replace earlier ones.
#
#   ./scripts/run_fleet.sh            eight rounds, as long as the boards need
#   ./scripts/run_fleet.sh --tests    the tests that need Flower, instead
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
extra_requirement=""
oldest_minor=11  # Flower's
prepare_environment .venv-fleet constraints-fleet.txt requirements-fleet.txt
if [[ ${1:-} == --tests ]]; then
  exec "$python" -m pytest -n 2 tests/extensions/fleet/test_{faults,app,strategy,average}.py "${@:2}"
fi

logdir=logs/fleet
port=$("$python" -c "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); print(s.getsockname()[1])")
rm -rf $logdir/board-* $logdir/photos
"$python" scripts/tools/digits_on_boards.py $logdir/photos
boards=()
trap 'kill "${boards[@]}" 2>/dev/null || true' EXIT
join() {  # number, slowdown
  "$python" fleet.py join --superlink "127.0.0.1:$port" --name "board-$1" --slowdown "$2" --logdir $logdir \
    --dataset_name image_folder --data_dir "$logdir/photos/board-$1" --test_fraction 0.1 >"$logdir/board-$1.log" 2>&1 &
  boards+=($!)
}
# The boards share one timing table, which the first one measures: three at a time would disturb each other.
until ls $logdir/profiles/*/profile.json >/dev/null 2>&1; do sleep 1; done &
table=$!
join 1 1
"$python" fleet.py serve --boards 3 --rounds 8 --round_passes 6 --port "$port" --logdir $logdir --run_name server \
  --overwrite --dataset_name image_folder --data_dir $logdir/photos/all --model_name mobilenetv2 --alpha 0.35 \
  --input_size 64 --batch_size 16 --augment none --weights weights/mobilenetv2_0.35_glyphs.weights.h5 &
server=$!
boards+=("$server" "$table")
wait -n "$table" "$server"
join 2 5
join 3 15
wait "$server"
"$python" scripts/benchmarks/benchmark_fleet.py --data_set digits --fleet_rounds 8 --seeds 1 --logdir $logdir/rules \
  2>$logdir/rules.log | tail -1 >$logdir/rules.json || { tail -5 $logdir/rules.log >&2; exit 1; }
"$python" scripts/figures/plot_fleet.py $logdir/server --output figures/fleet --rules $logdir/rules.json
