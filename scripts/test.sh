#!/usr/bin/env bash
# Runs the whole test suite on a fresh machine with Python 3.11+ and bash: makes .venv, then ruff
# check, ruff format --check, pytest. Arguments go to pytest:
#   bash scripts/test.sh                                     everything
#   bash scripts/test.sh -m "not slow" tests/test_house.py   what pytest understands
#   bash scripts/test.sh -n 0 --pdb -k house                 in one process, for a debugger
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
env_peers
cd "$HYMOE_REPO"

# Tests run in two processes and start process groups of their own: one thread each is faster than
# threads that fight for the cores, and keeps float32 sums the same on every machine.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 # no test reaches for the network

echo "[test] ruff check"
ruff check .
echo "[test] ruff format --check"
ruff format --check .
echo "[test] pytest"
# One file stays in one process (--dist loadfile), so what a module prepares is prepared once.
exec python -m pytest -n 2 --dist loadfile "$@"
