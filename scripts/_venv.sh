# Sourced by the other scripts: goes to the repository's root and sees to a virtual environment
# with WavePP in it. Nothing but Python (3.11 or newer) with pip is taken for granted.
#
#   use_venv demo|test     installs that extra if this folder's environment has not got it yet,
#                          or has an older one; afterwards its commands come first in PATH
#
# WAVEPP_VENV chooses the folder (default .venv), PYTHON the interpreter that makes it.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# A plain "torch" may bring a build that the pinned Ray and transformers were not tried with.
TORCH="torch==2.13.0"

find_python() {
  local candidate
  for candidate in "${PYTHON:-python3.11}" python3.12 python3.13 python3 python; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "WavePP needs Python 3.11 or newer; name one with PYTHON=..." >&2
  return 1
}

# Where the code is and what it asks for: another answer makes an installed environment stale.
stamp_of() {
  { pwd -P; cat pyproject.toml scripts/_venv.sh; } | sha256sum | cut -d ' ' -f 1
}

use_venv() {
  local extra="$1" venv="${WAVEPP_VENV:-.venv}" stamp python
  stamp="$(stamp_of)"
  if ! "$venv/bin/python" -c '' 2>/dev/null; then
    python="$(find_python)"
    echo "making $venv with $python ..."
    "$python" -m venv --clear "$venv"
  fi
  venv="$(cd "$venv" && pwd -P)"
  # What the tests need holds what the demo needs, so either stamp serves the demo.
  if ! grep -qsx "$stamp" "$venv/.wavepp-test" &&
     ! { [ "$extra" = demo ] && grep -qsx "$stamp" "$venv/.wavepp-demo"; }; then
    echo "installing wavepp[$extra] into $venv (minutes the first time) ..."
    "$venv/bin/python" -m pip install --quiet --no-input "$TORCH"
    "$venv/bin/python" -m pip install --quiet --no-input "$TORCH" --editable ".[$extra]"
    echo "$stamp" > "$venv/.wavepp-$extra"
  fi
  export VIRTUAL_ENV="$venv" PATH="$venv/bin:$PATH"
}
