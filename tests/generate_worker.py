"""What a rank does in tests/test_generate.py: the tokens of sharded models beside those of the whole one, to a file."""

import json
import sys
from pathlib import Path

import torch

from hymoe.engine import parallel
from hymoe.engine.generate import generate
from tests.plan_worker import build
from tests.tiny import tiny_lm

PROMPTS = [[1], [5, 9, 2], list(range(20, 37)), [90] * 6]


def main(out: Path) -> None:
    """One file a rank: plan -> tokens of each prompt."""
    options = {"max_new_tokens": 8, "stop_ids": {7}, "batch": 3}
    found = {"whole": [a.ids for a in generate(tiny_lm(seed=5), PROMPTS, **options)]}
    for expert_parallel in (1, 2):
        plan = parallel.start(torch.device("cpu"), 2, expert_parallel)
        lm, _ = build(plan)
        answers = generate(lm, PROMPTS, **options)
        found[f"expert_parallel {expert_parallel}"] = [a.ids for a in answers]
    plan.close()
    (out / f"{plan.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
