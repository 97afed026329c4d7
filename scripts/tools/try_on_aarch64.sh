#!/usr/bin/env bash
# Try the project on a 64-bit Arm board that is emulated: Debian 12 in a folder, by qemu. It follows "An offline board" of
# docs/your_data_and_networks.md, profiles, kills an elastic run and resumes it, exports, trains with the board's program,
# and runs some tests; the same run here shows how far numbers differ. Needs root and Debian's packages debootstrap and
# qemu-user-static; takes one to two hours, half an hour of them the tests.
#
#   sudo scripts/tools/try_on_aarch64.sh [FOLDER [CONSTRAINTS]]    # default: in ~/.cache, constraints.txt
#
# What is in FOLDER already is used again. Use another one with constraints-oldest.txt, the oldest TensorFlow.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
root=$(realpath -m "${1:-${XDG_CACHE_HOME:-$HOME/.cache}/elastic_trainer_aarch64}")
if [[ $EUID != 0 ]] || ! command -v debootstrap >/dev/null || ! [[ -e /proc/sys/fs/binfmt_misc/qemu-aarch64 ]]; then
  echo "try_on_aarch64.sh: needs root and binfmt's qemu-aarch64: apt install debootstrap qemu-user-static binfmt-support" >&2
  exit 2
fi
constraints=${2:-constraints.txt}
python=${PYTHON:-.venv/bin/python}
packages=(-r requirements.txt pytest pytest-xdist hypothesis ai-edge-litert)
tests=(tests/selection tests/test_selection_solver.py tests/timing/test_fit.py tests/training/test_closed_form_head.py
  tests/networks/test_batch_norm.py tests/test_step_trace.py tests/runs)

if ! [[ -d $root/debian/usr/lib/python3.11 ]]; then
  debootstrap --arch=arm64 --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$root/debian.making"
  mv "$root/debian.making" "$root/debian"
fi
if ! [[ -d $root/wheels ]]; then
  "$python" -m pip wheel -q -w "$root/wheels.making" --no-deps promise==2.3
  platforms=()
  for name in manylinux_2_35 manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014; do
    platforms+=(--platform "${name}_aarch64")
  done
  "$python" -m pip download -q -d "$root/wheels.making" -f "$root/wheels.making" "${packages[@]}" -c "$constraints" \
    --only-binary :all: "${platforms[@]}" --python-version 3.11
  mv "$root/wheels.making" "$root/wheels"
fi
board=$root/debian/srv/project
rm -rf "$board" && mkdir -p "$board" "$root/debian/srv/wheels"
git archive HEAD | tar -x -C "$board"
cp -n "$root"/wheels/* "$root/debian/srv/wheels/"
mount --bind /proc "$root/debian/proc"
trap 'umount "$root/debian/proc"' EXIT

there() { # command on the emulated board
  chroot "$root/debian" /usr/bin/env -i HOME=/srv PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 \
    bash -c "cd /srv/project && $1"
}
timed() {
  local start=$SECONDS
  echo "== $1"
  there "$2"
  echo "== $1: $((SECONDS - start)) s"
}
[[ -x $root/debian/srv/venv/bin/pytest ]] || timed "install" "python3 -m venv /srv/venv && \
  /srv/venv/bin/python -m pip install -q --no-index --find-links /srv/wheels ${packages[*]}"
small="--dataset_name image_folder --data_dir ../photos/board-1 --model_name mobilenetv2 --alpha 0.35 --input_size 64 \
  --weights none --batch_size 16 --logdir ../logs"
run="--train_type elastic_training --rho 0.6 --num_epochs 3 --interval 1 --deterministic --save_model --run_name run"
there "/srv/venv/bin/python scripts/tools/digits_on_boards.py ../photos"
timed "import TensorFlow" "/srv/venv/bin/python -c 'import tensorflow'"
timed "profiler.py" "/srv/venv/bin/python profiler.py $small"
# A chroot sees all processes of this machine, so the run is killed by its number.
timed "main.py, killed at a checkpoint" "rm -rf ../logs/run; /srv/venv/bin/python main.py $small $run --checkpoint_minutes 0 & \
  while kill -0 \$! && ! ls ../logs/run/checkpoints/step-*.npz >/dev/null 2>&1; do sleep 1; done; kill -9 \$!; wait || true"
timed "main.py --resume" "/srv/venv/bin/python main.py $small $run --resume --export tflite"
timed "main.py --export train_tflite" "/srv/venv/bin/python main.py $small --rho 0.6 --num_epochs 2 --run_name step \
  --export train_tflite"
timed "board_train.py" "/srv/venv/bin/python ../logs/step_board/board_train.py --data_dir ../photos/board-1 --overwrite"
# The same steps here, by the board's timing table: deterministic runs agree only with one table.
rm -rf "$root/here" && mkdir "$root/here" && cp -r "$root/debian/srv/logs" "$root/debian/srv/photos" "$root/here"
rm -rf "$root/here/logs/run" && cp -r "$board" "$root/here/project"
here=$(realpath -s "$python")
(cd "$root/here/project" && "$here" main.py $small $run --allow_stale_profile)
"$python" - "$root/debian/srv/logs/run" "$root/here/logs/run" <<'COMPARE'
import sys
from pathlib import Path

import keras
import numpy as np

there, here = (keras.models.load_model(Path(folder) / "last.keras", compile=False) for folder in sys.argv[1:])
pairs = [(one.numpy(), other.numpy()) for one, other in zip(there.variables, here.variables, strict=True)]
apart = max(float(np.abs(one - other).max() / max(np.abs(other).max(), 1e-12)) for one, other in pairs)
print(f"== weights there and here differ by at most {apart:.1e} of the largest of their tensor")
COMPARE
timed "tests" "/srv/venv/bin/python -m pytest -q ${tests[*]} -p no:cacheprovider"
