#!/usr/bin/env bash
# The main job from end to end on a fresh machine with Python 3.11+ and bash: installs into .venv,
# makes a small base checkpoint and chat data, trains on 4 ranks, exports, generates, and prints the
# share of right answers before and after. Runs from any folder, and again.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$HYMOE_REPO"
