#!/usr/bin/env bash
# The main job from end to end on a fresh machine with Python 3.11+ and bash: installs into .venv,
# makes a small base checkpoint and chat data, trains on 4 ranks, exports, generates, and prints the
# share of right answers before and after. Runs from any folder, and again.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$HYMOE_REPO"

export TOKENIZERS_PARALLELISM=false
DEMO=runs/demo RUN=runs/demo_run
say() { printf '\n[quickstart %3ss] %s\n' "$SECONDS" "$*"; }
answer() { python scripts/generate.py --model "$1" --prompts "$DEMO/prompts.jsonl" --out "$2" --max-new-tokens 24; }
SECONDS=0

say "1/4 a base checkpoint in HF format with random weights, chat data, prompts that a rule can check ($DEMO)"
python scripts/make_demo.py --out "$DEMO"

say "2/4 the base answers prompts that are not in the training data"
answer "$DEMO/base" "$DEMO/answers_before.jsonl"

say "3/4 training on 4 ranks; the recipe is $DEMO/recipe.toml"
# One thread a rank: four processes share the machine.
OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" torchrun --standalone --nproc_per_node 4 scripts/train.py

say "4/4 the trained model ($RUN/final, loads in transformers) answers the same prompts"
answer "$RUN/final" "$DEMO/answers_after.jsonl"
python scripts/evaluate.py instructions --prompts "$DEMO/prompts.jsonl" \
    --answers "$DEMO/answers_before.jsonl" "$DEMO/answers_after.jsonl"

say "done; metrics are in $RUN/metrics.jsonl, evidence in $RUN/evidence.json"
