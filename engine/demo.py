"""The embedded default: a small base checkpoint and chat data whose answers a rule can check.

`write_demo` makes a folder with

```
base/            random weights in HF format, every layer kind, several shards, with a tokenizer
train.jsonl      conversations to train on, each answer passed its check
heldout.jsonl    the same distribution, other prompts: for eval_loss
prompts.jsonl    prompts with constraints (IFEval's layout), none of which occurs in the two above
recipe.toml      the run
```

**The task.** Six kinds of short instruction over a few dozen words, such as "Write as a JSON list:
river, lamp, stone". The base model answers none; a minute of training teaches it to copy, reverse, leave out, count
and change case. No constant answer keeps a kind's constraint on more than a few prompts.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hymoe.engine.data.chat import CHAT_TEMPLATE
from hymoe.engine.data.tokenizer import IM_END, Tokenizer, train_tokenizer
from hymoe.engine.eval.checks import check

WORDS = (
    "apple basket bridge candle castle cloud corn desert dragon eagle feather fire forest garden "
    "ghost hammer honey island kettle ladder lamp lemon mirror moon mountain needle ocean paper "
    "pepper pillow pocket river rocket saddle silver stone thunder tiger tower violin wagon winter"
).split()
NUMBERS = ("two", "three", "four", "five", "six")


@dataclass(frozen=True, slots=True)
class Example:
    """One instruction, its constraint, and an answer that keeps it."""

    prompt: str
    answer: str
    instruction_id: str
    arguments: dict[str, Any]


def _repeat(rng: random.Random) -> Example:
    word, times = rng.choice(WORDS), rng.randrange(len(NUMBERS))
    prompt = f"Write the word {word} {NUMBERS[times]} times."
    answer = " ".join([word] * (times + 2))
    return Example(prompt, answer, "words:repeated", {"word": word, "times": times + 2})


def _reverse(rng: random.Random) -> Example:
    items = _items(rng, 2)
    return Example(
        f"Write in reverse order: {', '.join(items)}",
        ", ".join(reversed(items)),
        "list:reversed",
        {"items": items},
    )


def _without(rng: random.Random) -> Example:
    items = _items(rng, 3)
    forbidden = rng.choice(items)
    return Example(
        f"Leave out {forbidden}: {', '.join(items)}",
        ", ".join(item for item in items if item != forbidden),
        "list:without",
        {"items": items, "forbidden": forbidden},
    )


def _bullets(rng: random.Random) -> Example:
    items = _items(rng, 2)
    return Example(
        f"Write as bullets: {', '.join(items)}",
        "\n".join(f"- {item}" for item in items),
        "list:bulleted",
        {"items": items},
    )


def _upper(rng: random.Random) -> Example:
    items = _items(rng, 2)
    return Example(
        f"Write in capital letters: {', '.join(items)}",
        ", ".join(items).upper(),
        "case:upper_list",
        {"items": items},
    )


def _json_list(rng: random.Random) -> Example:
    items = _items(rng, 2)
    return Example(
        f"Write as a JSON list: {', '.join(items)}", json.dumps(items), "json:list", {"items": items}
    )


KINDS: tuple[Callable[[random.Random], Example], ...] = (
    _repeat,
    _reverse,
    _without,
    _bullets,
    _upper,
    _json_list,
)


def examples(seed: int) -> Iterator[Example]:
    """Endless examples, the kinds in turn, no prompt twice, each answer verified by its check."""
    rng = random.Random(seed)
    seen: set[str] = set()
    while True:
        for make in KINDS:
            example = make(rng)
            while example.prompt in seen:
                example = make(rng)
            seen.add(example.prompt)
            if check(example.instruction_id, example.answer, example.arguments).passed:
                yield example


def _items(rng: random.Random, fewest: int) -> list[str]:
    return rng.sample(WORDS, rng.randint(fewest, 4))
