"""Answers that pass their constraints and are no answers: cut, empty, loops, copies of the prompt."""

import gzip
import json
import random
from collections import Counter
from pathlib import Path

from hymoe.engine.eval.decency import fault, loop
from hymoe.engine.eval.instruct import read_prompts


def test_loops() -> None:
    assert loop("It was a very very very good day") is None
    assert loop("no no no no") == "'no' comes 4 times in a row or more"
    assert "comes 4 times in a row" in loop("Start. " + "I am not sure, what to say. " * 4)
    assert loop("Start. " + "I am not sure, what to say. " * 2) is None
    assert "comes 4 times" in loop("\u6211\u5f88\u597d\u3002" * 4)
    sentences = [f"{a} {b} went home" for a in ("Ann", "Bob", "Cy") for b in ("Day", "Eve", "Fox")]
    assert loop(". ".join(sentences)) is None
    mixed = [sentence for n in range(6) for sentence in random.sample(sentences, 9)]
    assert "are different" in loop(". ".join(mixed))


def test_copies_of_the_prompt() -> None:
    prompt = "Write a short story about a river that floods every spring. Do not use any commas."
    kinds = ("punctuation:no_comma",)
    assert fault(prompt, prompt, kinds) == (
        "parrots the prompt",
        "100% of its runs of 6 words are the prompt's",
    )
    shouted = f"# {prompt.upper()}\n\nSure!"
    assert fault(shouted, prompt, kinds)[0] == "parrots the prompt"
    told = "Once a river that floods every spring took a bridge and nobody in the town was surprised by it at all."
    assert fault(told, prompt, kinds) is None
    assert fault("A river", "A river?", kinds)[0] == "parrots the prompt"
    assert fault("Yes", "Is it a river?", kinds) is None
    # Where the request is to be repeated, what comes after it counts.
    repeat = ("combination:repeat_prompt",)
    assert fault(f"{prompt}\n{told}", prompt, repeat, given=prompt) is None
    assert fault(prompt, prompt, repeat, given=prompt) == (
        "parrots the prompt",
        "it has nothing but the request",
    )
    # A list that is asked for in full is no copy, and a word that is asked for six times no loop.
    items = ", ".join("abcdefgh")
    assert fault(items, f"Copy: {items}", ("list:without",)) is None
    assert fault("lamp " * 6, "Repeat lamp 6 times", ("words:repeated",)) is None
    assert fault("lamp " * 6, "Repeat lamp 6 times", ("words:repeated",), "length")[0] == "cut"
    assert fault(" \n", prompt, kinds) == ("empty", "it has no text")


def test_on_what_models_answered(shared_dir: Path) -> None:
    """A careful model loses next to nothing, a tiny one the loops that it is known for."""
    folder = shared_dir / "data" / "ifeval"
    asked = {one.key: one for one in read_prompts(folder / "input_data.jsonl")}
    found = {}
    for model in (
        "gpt-4o-mini-2024-07-18",
        "claude-3-haiku-20240307",
        "Qwen__Qwen2.5-0.5B-Instruct-GPTQ-Int4",
    ):
        reasons: Counter[str] = Counter()
        with gzip.open(folder / f"{model}.jsonl.gz", "rt", encoding="utf-8") as file:
            for row in map(json.loads, file):
                one = asked[str(row["key"])]
                given = "".join(a.get("prompt_to_repeat") or "" for a in one.arguments)
                refused = fault(row["response"], one.prompt, one.instruction_ids, given=given)
                reasons[refused[0] if refused else "fine"] += 1
        found[model[:4]] = reasons
    assert found["gpt-"]["repeats itself"] + found["clau"]["repeats itself"] <= 2
    assert found["gpt-"]["fine"] > 0.99 * 541
    assert found["clau"]["fine"] > 0.98 * 541
    assert found["Qwen"]["repeats itself"] > 0.3 * 541
