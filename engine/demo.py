"""The embedded default: a small base checkpoint and chat data whose answers a rule can check.

`write_demo` makes a folder with

- `base/`: about 0.7 million random parameters in HF format, every layer kind, several shards, a tokenizer;
- `train.jsonl`: conversations to train on; each answer passed its check;
- `heldout.jsonl`: the same with other prompts, for eval_loss;
- `prompts.jsonl`: prompts with their constraints, none of which occurs in the two above;
- `recipe.toml`: the run.

**The task.** Six kinds of short instruction over 32 words, such as "JSON list: river, lamp, stone". The base
model follows none; a minute of training teaches it to copy, reverse, leave out, count and change case. No constant
answer keeps a kind's constraint on more than a few prompts.

**Why it is learnable in a minute** (measured): words are single tokens wherever they stand; attention comes second, so
that a head can look for the word after the last one written (pattern `M*EM*-`; with `ME*-` first it takes many times as
long); at 2,048 tokens a step, copying appears after about 100 steps and the rest by 250.
"""

import hashlib
import itertools
import json
import random
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hymoe.engine import recipe as recipes
from hymoe.engine.data.chat import CHAT_TEMPLATE
from hymoe.engine.data.tokenizer import IM_END, IM_START, Tokenizer, train_tokenizer
from hymoe.engine.errors import UserError
from hymoe.engine.eval.checks import check
from hymoe.engine.hf_checkpoint import save_pretrained
from hymoe.model.config import HybridConfig
from hymoe.model.net import HybridLM

FOLDER = Path("runs/demo")
RUN_FOLDER = Path("runs/demo_run")
STAMP = "made_by.json"  # written last: a folder that has it is whole
SEED = 4242
WORDS = (
    *("apple", "bridge", "candle", "castle", "cloud", "desert", "dragon", "eagle"),
    *("feather", "forest", "garden", "hammer", "honey", "island", "kettle", "ladder"),
    *("lamp", "mirror", "moon", "needle", "ocean", "paper", "pepper", "pocket"),
    *("river", "rocket", "silver", "stone", "thunder", "tiger", "tower", "violin"),
)
NUMBERS = ("two", "three", "four", "five")
PROMPTS_A_KIND = 32  # an evaluation of a few seconds that tells 5 % from 60 %
HELD_OUT_A_KIND = 16
TRAIN_ROWS = 16_000  # the steps below read each one to two times
SHARD_BYTES = 1_000_000  # small, so that there are several
CONFIG: dict[str, Any] = {
    "model_type": "nemotron_h",
    "architectures": ["NemotronHForCausalLM"],
    "hidden_size": 128,
    "layers_block_type": ["mamba", "attention", "moe", "mamba", "attention", "mlp"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "n_groups": 2,
    "ssm_state_size": 32,
    "conv_kernel": 4,
    "chunk_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "moe_shared_expert_intermediate_size": 128,
    "routed_scaling_factor": 1.0,
    "time_step_min": 0.001,
    "time_step_limit": [
        0.001,
        float("inf"),
    ],  # what transformers computes, so that outputs can be compared
    "initializer_range": 0.04,  # twice the usual: at this width it shortens the start
    "dtype": "float32",
}


@dataclass(frozen=True, slots=True)
class Example:
    """One instruction, its constraint, and an answer that keeps it."""

    prompt: str
    answer: str
    instruction_id: str
    arguments: dict[str, Any]


def _repeat(rng: random.Random) -> Example:
    word, times = rng.choice(WORDS), rng.randrange(len(NUMBERS))
    prompt = f"Repeat {word} {NUMBERS[times]} times"
    answer = " ".join([word] * (times + 2))
    return Example(prompt, answer, "words:repeated", {"word": word, "times": times + 2})


def _reverse(rng: random.Random) -> Example:
    items = _items(rng, 2)
    return Example(
        f"Reverse: {', '.join(items)}",
        ", ".join(reversed(items)),
        "list:reversed",
        {"items": items},
    )


def _without(rng: random.Random) -> Example:
    items = _items(rng, 3, 3)
    forbidden = rng.choice(items)
    return Example(
        f"Omit {forbidden}: {', '.join(items)}",
        ", ".join(item for item in items if item != forbidden),
        "list:without",
        {"items": items, "forbidden": forbidden},
    )


def _bullets(rng: random.Random) -> Example:
    items = _items(rng, 2)
    return Example(
        f"Bullets: {', '.join(items)}",
        "\n".join(f"- {item}" for item in items),
        "list:bulleted",
        {"items": items},
    )


def _upper(rng: random.Random) -> Example:
    items = _items(rng, 2)
    return Example(
        f"Capitals: {', '.join(items)}",
        ", ".join(items).upper(),
        "case:upper_list",
        {"items": items},
    )


def _json_list(rng: random.Random) -> Example:
    items = _items(rng, 2)
    return Example(
        f"JSON list: {', '.join(items)}",
        json.dumps(items),
        "json:list",
        {"items": items},
    )


KINDS: tuple[Callable[[random.Random], Example], ...] = (
    _repeat,
    _reverse,
    _without,
    _bullets,
    _without,  # the hardest to learn: twice as many examples
    _upper,
    _json_list,
)


def examples(seed: int, excluded: Collection[str] = ()) -> Iterator[Example]:
    """Endless examples, the kinds in turn, each answer verified by its check.

    Args:
        seed: decides everything.
        excluded: prompts that do not occur.
    """
    rng = random.Random(seed)
    while True:
        for make in KINDS:
            example = make(rng)
            while example.prompt in excluded:
                example = make(rng)
            if check(example.instruction_id, example.answer, example.arguments).passed:
                yield example


def demo_recipe(rank: int, wait_s: float = 120.0) -> recipes.Recipe:
    """The recipe that `scripts/train.py` runs without one, its folder made where it is missing.

    Args:
        rank: of this process; 0 makes the folder, the others wait for it.
        wait_s: how long, in seconds.

    Raises:
        UserError: the folder holds something else, or rank 0 did not make it in time.
    """
    deadline = time.monotonic() + wait_s
    if rank == 0:
        ensure_demo(FOLDER)
    while not _is_whole(FOLDER):
        if time.monotonic() > deadline:
            raise UserError(f"{FOLDER}: rank 0 did not make it within {wait_s:.0f} s")
        time.sleep(0.1)
    return recipes.load(FOLDER / "recipe.toml")


def ensure_demo(folder: Path) -> bool:
    """Makes the demo folder unless this version of it is there already; True where it was made.

    Raises:
        UserError: the folder holds something that is not a demo.
    """
    if _is_whole(folder):
        return False
    if folder.exists() and any(folder.iterdir()) and not (folder / STAMP).is_file():
        raise UserError(f"{folder}: found other files, expected an empty folder or an earlier demo")
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        write_demo(partial, folder)
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return True


def write_demo(folder: Path, final: Path) -> None:
    """Writes everything into an empty folder.

    Args:
        folder: where to write.
        final: where it will lie, for the paths in the recipe.
    """
    prompts, held_out, train = demo_data()
    with (folder / "prompts.jsonl").open("w", encoding="utf-8") as file:
        for number, example in enumerate(prompts):
            kind = example.instruction_id.replace(":", "_")
            row = {
                "key": f"{kind}_{number:03d}",
                "prompt": example.prompt,
                "instruction_id_list": [example.instruction_id],
                "kwargs": [example.arguments],
            }
            file.write(json.dumps(row) + "\n")
    _write_chat(folder / "train.jsonl", train)
    _write_chat(folder / "heldout.jsonl", held_out)
    _write_base(folder / "base", train)
    recipe = _recipe(final)
    (folder / "recipe.toml").write_text(recipe.to_toml(), encoding="utf-8")
    (folder / STAMP).write_text(_stamp(), encoding="utf-8")


def demo_data() -> tuple[list[Example], list[Example], list[Example]]:
    """Prompts to evaluate on, held-out and training examples; no prompt is in two of them."""
    prompts = _distinct(examples(SEED), PROMPTS_A_KIND)
    used = {example.prompt for example in prompts}
    held_out = _distinct(examples(SEED + 1, used), HELD_OUT_A_KIND)
    used |= {example.prompt for example in held_out}
    train = list(itertools.islice(examples(SEED + 2, used), TRAIN_ROWS))
    return prompts, held_out, train


def _distinct(stream: Iterable[Example], per_kind: int) -> list[Example]:
    """The first examples of each kind, no prompt twice, the kinds in turn."""
    by_kind: dict[str, dict[str, Example]] = {
        make(random.Random(0)).instruction_id: {} for make in KINDS
    }
    for example in stream:
        chosen = by_kind[example.instruction_id]
        if len(chosen) < per_kind:
            chosen.setdefault(example.prompt, example)
        if all(len(chosen) == per_kind for chosen in by_kind.values()):
            break
    turns = zip(*(chosen.values() for chosen in by_kind.values()), strict=True)
    return list(itertools.chain.from_iterable(turns))


def _write_chat(path: Path, rows: Iterable[Example]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for example in rows:
            messages = [
                {"role": "user", "content": example.prompt},
                {"role": "assistant", "content": example.answer},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")


def _write_base(folder: Path, train: list[Example]) -> None:
    """The base checkpoint: weights, config, tokenizer, generation settings, template."""
    scratch = folder.with_name("tokenizer.json")
    turns = ("system\n", "user\n", "assistant\n", "\n")
    texts = (text for example in train[:2000] for text in (example.prompt, example.answer, *turns))
    train_tokenizer(texts, scratch)
    tokenizer = Tokenizer(scratch)
    ends = {
        "bos_token_id": tokenizer.im_start,
        "eos_token_id": tokenizer.im_end,
        "pad_token_id": tokenizer.im_end,
    }
    lm = HybridLM(
        HybridConfig.from_dict({**CONFIG, **ends, "vocab_size": tokenizer.vocab_size}),
        kernels="torch",
    )
    lm.init_weights(SEED)
    save_pretrained(lm, folder, max_shard_size=SHARD_BYTES)
    scratch.rename(folder / "tokenizer.json")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": IM_START,
        "eos_token": IM_END,
        "pad_token": IM_END,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", settings)
    _write_json(folder / "generation_config.json", {**ends, "do_sample": False})


def _recipe(folder: Path) -> recipes.Recipe:
    return recipes.Recipe(
        model=recipes.Model(path=str(folder / "base")),
        data=recipes.Data(
            path=str(folder / "train.jsonl"),
            eval=str(folder / "heldout.jsonl"),
            seq_len=256,
            micro_tokens=512,
        ),
        optim=recipes.Optim(lr=3e-3, warmup_steps=20, weight_decay=0.0, beta2=0.99),
        train=recipes.Train(steps=320, step_tokens=2048, eval_every=60, seed=SEED, keep="all"),
        run=recipes.Run(dir=str(RUN_FOLDER), replace=True, log_every=10),
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _is_whole(folder: Path) -> bool:
    stamp = folder / STAMP
    return stamp.is_file() and stamp.read_text(encoding="utf-8") == _stamp()


def _stamp() -> str:
    """Changes with this file, so that a folder of an older version is made anew."""
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    return json.dumps({"demo_sha256": digest}) + "\n"


def _items(rng: random.Random, fewest: int, most: int = 3) -> list[str]:
    return rng.sample(WORDS, rng.randint(fewest, most))
