# Sourced by figure.sh, run_demo.sh, run_fleet.sh and run_tests.sh: makes the virtual environment and installs what is missing.
# `prepare_environment DIR CONSTRAINTS REQUIREMENT…` sets $python. Nothing is written outside the checkout.

python_is_supported() {
  "$1" -c "import sys; sys.exit(not (3, ${oldest_minor:-10}) <= sys.version_info[:2] <= (3, 13))" \
    2>/dev/null
}

prepare_environment() {
  local folder=$1 constraints=$2 candidate stamp
  shift 2
  python=$folder/bin/python
  if ! python_is_supported "$python"; then
    local base=""
    for candidate in "${PYTHON:-python3}" python3.12 python3.11 python3.13 python3.10; do
      if python_is_supported "$candidate"; then
        base=$candidate
        break
      fi
    done
    if [[ -z $base ]]; then
      echo "${0##*/}: error: no Python 3.${oldest_minor:-10} to 3.13 found; install one, or name it: PYTHON=/path/to/python3 $0" >&2
      exit 2
    fi
    echo "making $folder with $("$base" --version)"
    rm -rf "$folder"
    "$base" -m venv "$folder" || { rm -rf "$folder"; exit 1; }
  fi
  # The stamp is a copy of the requirements: pip runs only if they have changed.
  stamp=$(cat "$@" ${constraints:+"$constraints"}; echo "$extra_requirement")
  local name
  name=$(basename "${*: -1}" .txt)
  if [[ "$(cat "$folder/.installed-$name" 2>/dev/null)" != "$stamp" ]]; then
    echo "installing ${*: -1} into $folder (a few minutes the first time)"
    local arguments=()
    for candidate in "$@"; do arguments+=(-r "$candidate"); done
    # $extra_requirement may be several words.
    "$python" -m pip install --quiet --disable-pip-version-check "${arguments[@]}" $extra_requirement \
      ${constraints:+-c "$constraints"} || exit 1
    printf '%s\n' "$stamp" >"$folder/.installed-$name"
  fi
}
