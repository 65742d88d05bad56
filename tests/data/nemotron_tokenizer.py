"""The real models' tokenizer, rebuilt from a public vocabulary: Tekken's ids are its text ids less 1000.

`mistral-common` ships that vocabulary as ranked byte strings. A merge list follows from the ranks: a token's parts are
what byte-pair merging of lower ranks leaves of it.
"""

import base64
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

FIRST_TEXT_ID = 1000
CONTROL = {
    0: "<unk>", 1: "<s>", 2: "</s>", 10: "<|im_start|>", 11: "<|im_end|>", 12: "<think>", 13: "</think>",
    14: "<tool_call>", 15: "</tool_call>",
}  # fmt: skip


def vocabulary_file() -> Path:
    spec = importlib.util.find_spec("mistral_common")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("mistral-common is not installed: its vocabulary is the real tokenizer's")
    path = Path(spec.submodule_search_locations[0]) / "data" / "tekken_240718.json"
    if not path.is_file():
        pytest.skip(f"{path.name} is not in this mistral-common")
    return path


def write_tokenizer(path: Path) -> None:
    """Writes the tokenizer.json."""
    tekken = json.loads(vocabulary_file().read_text(encoding="utf-8"))
    size = tekken["config"]["default_vocab_size"] - tekken["config"]["default_num_special_tokens"]
    ranks = {base64.b64decode(t["token_bytes"]): t["rank"] for t in tekken["vocab"][:size]}
    letters = _byte_letters()
    spell = lambda token: "".join(letters[b] for b in token)  # noqa: E731
    vocab = {spell(token): rank + FIRST_TEXT_ID for token, rank in ranks.items()}
    for i in range(FIRST_TEXT_ID):
        vocab[CONTROL.get(i, f"<SPECIAL_{i}>")] = i
    merges = []
    for token, _ in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            left, right = _parts(token, ranks)
            merges.append([spell(left), spell(right)])
    split = {
        "type": "Split",
        "pattern": {"Regex": tekken["config"]["pattern"]},
        "behavior": "Isolated",
        "invert": False,
    }
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    content: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": CONTROL.get(i, f"<SPECIAL_{i}>"), "special": i not in (12, 13, 14, 15),
             "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
            for i in range(FIRST_TEXT_ID)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges, "ignore_merges": True},
    }  # fmt: skip
    path.write_text(json.dumps(content), encoding="utf-8")


def _parts(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """What merging pairs of the lowest rank first leaves of a token before the merge that makes it."""
    parts = [bytes([b]) for b in token]
    limit = ranks[token]
    while len(parts) > 2:
        best = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], limit))
        assert ranks.get(parts[best] + parts[best + 1], limit) < limit
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts[0], parts[1]


def _byte_letters() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary, as `tokenizers` writes them."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = iter(range(256, 512))
    letters = [chr(b) if b in kept else chr(next(moved)) for b in range(256)]
    assert sorted(letters) == sorted(pre_tokenizers.ByteLevel.alphabet())
    return letters
