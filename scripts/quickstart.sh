#!/usr/bin/env bash
# The main job from end to end on a fresh machine with Python 3.11+ and bash: installs into .venv,
# makes a small base checkpoint and chat data, trains on 4 ranks, exports, generates, and prints the
# share of right answers before and after. Runs from any folder, and again. About two minutes on two
# cores after the installation; everything it makes is in runs/.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$HYMOE_REPO"

step="starting"
say() {
    step="$1"
    printf '\n[quickstart] %3ds  %s\n' "$SECONDS" "$step"
}
trap 'printf "[quickstart] error: failed while %s\n" "$step" >&2' ERR

# Four ranks want four GPUs; with fewer, they share the CPU.
gpus="$(python -c 'import torch; print(torch.cuda.device_count())')"
if [ "$gpus" -lt 4 ]; then
    export CUDA_VISIBLE_DEVICES=""
fi
# One thread a process: a model this small gains nothing from more, and four ranks share the cores.
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
SECONDS=0

say "making a base checkpoint with random weights, chat data and prompts with rules"
python scripts/make_demo.py --out runs/demo

say "letting the untrained base answer the prompts"
python scripts/generate.py --model runs/demo/base --prompts runs/demo/prompts.jsonl \
    --out runs/demo_before.jsonl --max-new-tokens 16

say "training every parameter on 4 ranks, then exporting in HF format"
torchrun --standalone --nproc_per_node 4 scripts/train.py

say "letting the exported checkpoint answer the same prompts, none of which it was trained on"
python scripts/generate.py --model runs/demo_run/final --prompts runs/demo/prompts.jsonl \
    --out runs/demo_after.jsonl --max-new-tokens 16

say "checking both sets of answers by the rules of their prompts"
python scripts/evaluate.py instructions --prompts runs/demo/prompts.jsonl \
    --answers runs/demo_before.jsonl runs/demo_after.jsonl --show 6 --json runs/demo_evaluation.json

say "done: runs/demo_run/final is the trained checkpoint, runs/demo_run/metrics.jsonl its steps"
