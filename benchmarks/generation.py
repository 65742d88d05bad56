"""New tokens a second against transformers' `generate`, from one exported folder, on this machine.

Both sides load the folder, get the same prompts of different lengths and give as many new tokens, greedily: no stop id
is ever reached, so that the work is the same. transformers gets its batch padded on the left, as its users do, and runs
with what `from_pretrained` chooses. The time is that of the whole call, reading the prompts included.

The model is NVIDIA-Nemotron-3.5-Lightning-30B-A3B cut to an eighth of its width and to its first eight layers, with a
quarter of its experts. Aim: 2 times.

Gate before timing: in float32 the tokens of every prompt are equal; in bfloat16, where rounding decides between near
equals, the logits of our cached decoding differ from a full float32 pass at most twice as much as theirs.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Lap, finish, interleave, parser, ratio, show, stamp
from benchmarks.shapes import CUT
from hymoe.engine.generate import generate
from hymoe.engine.hf_checkpoint import load_pretrained, save_pretrained
from hymoe.model.config import HybridConfig
from hymoe.model.net import HybridLM

CONFIG: dict[str, Any] = {
    **CUT,
    # The reference bounds the time step in a full pass and not in a decoding step; so small, the bound does nothing.
    "time_step_min": 1e-6,
    "eos_token_id": None,
    "pad_token_id": 0,
}
TINY = {"hidden_size": 32, "vocab_size": 97, "moe_intermediate_size": 24, "n_routed_experts": 8}
BATCHES = (1, 16)
PROMPT, NEW = 96, 64  # tokens of the longest prompt, and of each answer
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
AIM = 2.0


def export(folder: Path, dtype: str, tiny: bool) -> None:
    """Writes the model, with random weights, as a user would have it."""
    config = HybridConfig.from_dict({**CONFIG, **(TINY if tiny else {}), "dtype": dtype})
    drawn = HybridLM(config)
    drawn.init_weights(seed=0)
    lm = HybridLM(config, dtype=DTYPES[dtype])
    lm.load_state_dict(drawn.state_dict())
    save_pretrained(lm, folder)


def make_prompts(batch: int, longest: int, vocab: int) -> list[list[int]]:
    """Random ids; lengths fall from the longest to a half of it."""
    rng = torch.Generator().manual_seed(batch)
    lengths = [longest - i * longest // (2 * batch) for i in range(batch)]
    return [torch.randint(1, vocab, (n,), generator=rng).tolist() for n in lengths]


def padded(prompts: list[list[int]]) -> dict[str, Tensor]:
    """A batch as transformers wants it."""
    longest = max(map(len, prompts))
    rows = [[0] * (longest - len(p)) + p for p in prompts]
    mask = [[0] * (longest - len(p)) + [1] * len(p) for p in prompts]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}


def ours(lm: HybridLM, prompts: list[list[int]], new: int) -> list[list[int]]:
    """Our answers."""
    return [a.ids for a in generate(lm, prompts, max_new_tokens=new, stop_ids=())]


def theirs(model: Any, inputs: dict[str, Tensor], new: int) -> list[list[int]]:
    """Their answers."""
    with torch.no_grad():
        found = model.generate(**inputs, max_new_tokens=new, do_sample=False)
    return found[:, inputs["input_ids"].shape[1] :].tolist()


def check(
    dtype: str, lm: HybridLM, model: Any, exact: HybridLM, prompts: list[list[int]], new: int
) -> str:
    """The gate; see the head of this file."""
    if dtype == "float32":
        mine, peer = ours(lm, prompts, new), theirs(model, padded(prompts), new)
        if mine != peer:
            sys.exit("the gate failed: tokens differ from transformers'")
        return "tokens equal"
    errors = []
    ids = torch.tensor(prompts[0])
    cut = len(ids) // 2
    bounds = torch.tensor([0, len(ids)], dtype=torch.int32)
    with torch.no_grad():
        right = exact.logits(exact(ids, bounds))[cut:]
        cache = lm.new_cache(len(ids))
        lm(ids[:cut], torch.tensor([0, cut], dtype=torch.int32), cache)
        mine = torch.cat([lm.logits(lm(id[None], None, cache)) for id in ids[cut:]])
        past = model(ids[None, :cut], use_cache=True).cache
        peer = torch.cat(
            [model(id[None, None], cache=past, use_cache=True).logits[0] for id in ids[cut:]]
        )
    errors = [float((t.float() - right).norm() / right.norm()) for t in (mine, peer)]
    if not errors[0] <= 2 * errors[1] + 4e-3:
        sys.exit(
            f"the gate failed: logits are off by {errors[0]:.2g}, transformers' by {errors[1]:.2g}"
        )
    return f"error {errors[0]:.2g}, theirs {errors[1]:.2g}"


def measure(dtype: str, options: Any) -> list[dict[str, Any]]:
    """Both batches of one precision."""
    from transformers import NemotronHForCausalLM

    longest, new = (12, 4) if options.tiny else (PROMPT, NEW)
    with tempfile.TemporaryDirectory() as name:
        export(Path(name), dtype, options.tiny)
        lm = load_pretrained(name)
        exact = load_pretrained(name, dtype=torch.float32)
        model = NemotronHForCausalLM.from_pretrained(name, dtype=DTYPES[dtype]).eval()
    cells = []
    for batch in BATCHES:
        prompts = make_prompts(batch, longest, lm.config.vocab_size)
        gate = check(dtype, lm, model, exact, prompts, new)
        inputs = padded(prompts)

        def run_ours(lap: Lap, prompts: list[list[int]] = prompts) -> None:
            ours(lm, prompts, new)

        def run_theirs(lap: Lap, inputs: dict[str, Tensor] = inputs) -> None:
            theirs(model, inputs, new)

        timings = interleave({"ours": run_ours, "transformers": run_theirs}, options.rounds)
        cells.append(
            {
                "cell": f"{dtype}, batch {batch}",
                "tokens_per_s": {n: batch * new / t.median for n, t in timings.items()},
                **ratio(timings["transformers"], timings["ours"]),
                "gate": gate,
            }
        )
    return cells


def main() -> None:
    """Prints one table."""
    options = parser(__doc__.partition("\n")[0], rounds=5)
    options.add_argument(
        "--tiny", action="store_true", help="sizes of a test: no figure worth reading"
    )
    options = options.parse_args()
    torch.set_num_threads(options.threads)
    cells = [cell for dtype in DTYPES for cell in measure(dtype, options)]
    headers = ["", "ours, tokens/s", "transformers", "times", "lowest", "highest", "gate"]
    rows = []
    for cell in cells:
        rates = [f"{rate:.0f}" for rate in cell["tokens_per_s"].values()]
        ratios = [f"{cell[key]:.2f}" for key in ("ratio", "lowest", "highest")]
        rows.append([cell["cell"], *rates, *ratios, cell["gate"]])
    show(headers, rows)
    print(f"aim: {AIM} times in every cell")
    finish({"benchmark": "generation", "stamp": stamp(), "cells": cells}, options.json)


if __name__ == "__main__":
    main()
