# Sourced by test.sh and quickstart.sh, from any folder: makes .venv in the repository, installs what
# constraints.txt pins, and leaves that environment active. Sets HYMOE_REPO. A second call finds
# everything in place (a stamp of the files that decide the installation) and says so. test.sh then
# calls env_peers.
#
# Where the Python on PATH already has torch >= 2.11 that sees a GPU, that torch is used: .venv lends
# its packages and only what is missing there is installed. Nothing outside .venv is ever changed.

HYMOE_REPO="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
HYMOE_VENV="$HYMOE_REPO/.venv"

env_say() { printf '[env] %s\n' "$*"; }
env_fail() { printf '[env] error: %s\n' "$*" >&2; exit 1; }

# Prints the first Python that is new enough and can make an environment.
env_find_python() {
    local candidate
    for candidate in python3 python3.12 python3.11 python3.13 python3.14 python; do
        if "$candidate" 2>/dev/null -c 'import sys, venv, ensurepip
if sys.version_info < (3, 11): sys.exit(1)
print(sys.executable)'; then
            return 0
        fi
    done
    return 1
}

# Succeeds where this Python has a torch that is new enough and sees a GPU; prints its version.
env_usable_torch() {
    "$1" - 2>/dev/null <<'PY'
import sys
import torch

version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
if version < (2, 11) or not torch.cuda.is_available():
    sys.exit(1)
print(torch.__version__)
PY
}

# One line that changes whenever the installation has to be made again.
env_stamp() {
    cat "$HYMOE_REPO/constraints.txt" "$HYMOE_REPO/setup.py" "$HYMOE_REPO/scripts/env.sh" |
        "$1" -c 'import hashlib, sys
print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest(), sys.argv[1])' "$HYMOE_REPO"
}

# Succeeds where .venv was made completely for the stamp $1, and lends from the Python in $2 if there
# is one to lend from.
env_up_to_date() {
    local stamp lender
    [ -x "$HYMOE_VENV/bin/python" ] && "$HYMOE_VENV/bin/python" -c '' 2>/dev/null || return 1
    { read -r stamp && read -r lender; } <"$HYMOE_VENV/hymoe-stamp" 2>/dev/null || return 1
    [ "$stamp" = "$1" ] && { [ -z "$2" ] || [ "$2" = "$lender" ]; }
}

# Makes the packages of the Python in $1 visible in .venv, after .venv's own.
env_lend() {
    "$HYMOE_VENV/bin/python" - "$1" "$HYMOE_VENV" <<'PY'
import pathlib
import subprocess
import sys
import sysconfig

lender, venv = sys.argv[1:]
code = "import site, sys; print('\\n'.join(p for p in sys.path if p.endswith('-packages')))"
folders = subprocess.run([lender, "-c", code], check=True, capture_output=True, text=True).stdout
pathlib.Path(sysconfig.get_path("purelib"), "lent_packages.pth").write_text(folders)
torchrun = pathlib.Path(venv, "bin", "torchrun")
torchrun.write_text(f'#!/bin/sh\nexec "{venv}/bin/python" -m torch.distributed.run "$@"\n')
torchrun.chmod(0o755)
PY
}

# Copies constraints.txt to $1 without the packages that .venv can already import.
env_missing_constraints() {
    "$HYMOE_VENV/bin/python" - "$HYMOE_REPO/constraints.txt" "$1" <<'PY'
import importlib.metadata
import pathlib
import re
import sys

source, target = map(pathlib.Path, sys.argv[1:])
normal = lambda name: re.sub(r"[-_.]+", "-", name).lower()
present = {normal(dist.name) for dist in importlib.metadata.distributions()} - {"pip", "setuptools"}
lines = source.read_text().splitlines(keepends=True)
target.write_text("".join(x for x in lines if normal(x.split("==")[0]) not in present))
PY
}

env_pip() {
    local quiet="-qq" # errors only in a log; on a terminal pip shows its progress
    if [ -t 1 ]; then quiet="--progress-bar=on"; fi
    "$HYMOE_VENV/bin/python" -m pip --disable-pip-version-check install "$quiet" "$@" ||
        env_fail "pip could not install: $*"
}

env_install() {
    local python="$1" lent="$2" constraints="$HYMOE_VENV/hymoe-constraints.txt"
    if [ -e "$HYMOE_VENV" ] && [ ! -e "$HYMOE_VENV/hymoe-stamp" ]; then
        env_fail "$HYMOE_VENV exists and was not made by this script; move it away"
    fi
    env_say "making $HYMOE_VENV with $("$python" --version) ($python)"
    rm -rf "$HYMOE_VENV"
    mkdir "$HYMOE_VENV"
    echo incomplete >"$HYMOE_VENV/hymoe-stamp" # an interrupted installation is made again
    "$python" -m venv "$HYMOE_VENV" || env_fail "$python could not make an environment"
    if [ -n "$lent" ]; then
        env_say "using torch $lent of $python, which sees a GPU; installing only what is missing there"
        env_lend "$python"
    else
        env_say "installing $(grep '^torch==' "$HYMOE_REPO/constraints.txt") (the largest download) ..."
        # A CUDA build of torch brings the Triton that fits it, which need not be the pinned one.
        grep -v '^triton==' "$HYMOE_REPO/constraints.txt" >"$constraints"
        env_pip --constraint "$constraints" torch setuptools
    fi
    env_missing_constraints "$constraints" # what is there stays, what is missing gets the tested version
    if ! "$HYMOE_VENV/bin/python" 2>/dev/null -c 'import setuptools, sys
sys.exit(int(setuptools.__version__.split(".")[0]) < 77)'; then
        env_pip "$(grep '^setuptools==' "$HYMOE_REPO/constraints.txt")"
    fi
    env_say "installing hymoe and the rest from constraints.txt ..."
    env_pip --no-build-isolation --constraint "$constraints" --editable "$HYMOE_REPO[test]"
    printf '%s\n%s\n' "$(env_stamp "$python")" "${lent:+$python}" >"$HYMOE_VENV/hymoe-stamp"
}

# Installs what tests compare with: mamba-ssm and causal-conv1d as the pure Python that they are without
# their CUDA extensions, and mistral-common for its vocabulary, none with its dependencies. Not where
# torch sees a GPU: there a run would take the former for the real packages, which are built against the
# machine's own torch.
env_peers() {
    local pins
    mapfile -t pins < <(grep -E '^(mamba-ssm|causal-conv1d|mistral-common)==' "$HYMOE_REPO/constraints.txt")
    if "$HYMOE_VENV/bin/python" 2>/dev/null - "${pins[@]}" <<'PY'
import importlib.metadata
import sys

pins = [pin.split("==") for pin in sys.argv[1:]]
sys.exit(any(importlib.metadata.version(name) != version for name, version in pins))
PY
    then return; fi
    if env_usable_torch "$HYMOE_VENV/bin/python" >/dev/null; then return; fi
    env_say "building ${pins[*]} without CUDA, for tests to compare with ..."
    env_pip --constraint "$HYMOE_REPO/constraints.txt" wheel einops
    MAMBA_FORCE_BUILD=TRUE MAMBA_SKIP_CUDA_BUILD=TRUE CAUSAL_CONV1D_FORCE_BUILD=TRUE \
        CAUSAL_CONV1D_SKIP_CUDA_BUILD=TRUE env_pip --no-build-isolation --no-deps "${pins[@]}"
}

env_activate() {
    local python lent
    # A .venv of ours that happens to be active must not be taken for the Python to build it from.
    PATH="$(printf '%s' "$PATH" | tr ':' '\n' | grep -vxF "$HYMOE_VENV/bin" | paste -sd: -)"
    hash -r
    python="$(env_find_python)" ||
        env_fail "needs Python 3.11 or newer with its venv module (Debian, Ubuntu: apt-get install python3-venv)"
    lent="$(env_usable_torch "$python")" || lent=""
    if env_up_to_date "$(env_stamp "$python")" "${lent:+$python}"; then
        env_say "$HYMOE_VENV is up to date"
    else
        env_install "$python" "$lent"
    fi
    VIRTUAL_ENV="$HYMOE_VENV"
    PATH="$HYMOE_VENV/bin:$PATH"
    export VIRTUAL_ENV PATH
    unset PYTHONHOME
    hash -r
}

env_activate
