"""Text to token ids and back, with control tokens kept out of reach of the text.

A chat row is made of control tokens, which only `chat.py` writes, and of text, which somebody else
wrote. Text never becomes a control token here, whatever it spells: `<|im_end|>` or `<think>` in a
user's message is encoded as the characters it consists of, and decodes back to them.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from hymoe.engine.errors import UserError

IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
CONTROL_TOKENS = (IM_START, IM_END)
# Runs of letters, single digits, runs of anything else: a word is then the same token wherever it
# stands.
WORD_PIECES = r"\p{L}+|\p{N}|[^\p{L}\p{N}]+"


class Tokenizer:
    """A `tokenizer.json`, as the rest of the engine uses it.

    Attributes:
        path: the tokenizer.json that was read.
        im_start: id of `<|im_start|>`.
        im_end: id of `<|im_end|>`.
        vocab_size: one more than the highest id, added tokens included.
    """

    def __init__(self, path: Path | str) -> None:
        """Reads a checkpoint folder's tokenizer.json, or the file itself.

        Raises:
            UserError: no such file, not a tokenizer, or without `<|im_start|>` or `<|im_end|>`.
        """
        path = Path(path)
        self.path = path / "tokenizer.json" if path.is_dir() else path
        content = _read_json(self.path)
        added = content.get("added_tokens") or []
        self._hidden = frozenset(token["id"] for token in added if token.get("special"))
        self._added = {token["id"]: token["content"] for token in added}
        self._fixed: dict[str, list[int]] = {}
        self._control_spellings = frozenset(self._added.values())
        longest_first = sorted(self._control_spellings, key=lambda t: (-len(t), t))
        self._control_pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")
        # `encode_special_tokens` hides only tokens that are marked special, and a checkpoint leaves
        # some unmarked (`<think>`). In this copy all are; what decoding leaves out is decided in
        # `decode`.
        for token in added:
            token["special"] = True
        try:
            self._backend = Backend.from_str(json.dumps(content))
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"{self.path}: found no tokenizer that loads: {error}") from error
        self._backend.encode_special_tokens = True
        self._backend.no_truncation()
        self._backend.no_padding()
        self.im_start = self._control_id(IM_START)
        self.im_end = self._control_id(IM_END)
        self.vocab_size = max(self._backend.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text; nothing in front of it or after it, and never a control token.

        Raises:
            UserError: this vocabulary spells a control token inside ordinary text.
        """
        # Without character offsets, which nobody here asks for, it takes 30 % less.
        ids = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if not self._added.keys().isdisjoint(ids):
            # Seen with models that look a whole word up in the vocabulary before they split it.
            found = next(self._added[i] for i in ids if i in self._added)
            raise UserError(
                f"{self.path}: text became the control token {found!r}, expected plain text "
                "tokens; its model has that spelling in the vocabulary of text"
            )
        return ids

    def is_control(self, id: int) -> bool:
        """Whether an id is a control token's."""
        return id in self._added

    def encode_fixed(self, text: str) -> list[int]:
        """Ids of a template's own text, its control tokens as such; kept, because headers recur with every turn."""
        if text not in self._fixed:
            self._fixed[text] = [
                i
                for piece, is_control in self.split_control(text)
                for i in ([self.id_of(piece)] if is_control else self.encode(piece))
            ]
        return self._fixed[text]

    def split_control(self, text: str) -> list[tuple[str, bool]]:
        """Cuts a template's own text at its control tokens: (piece, whether it is a control token), none empty."""
        return [
            (piece, piece in self._control_spellings)
            for piece in self._control_pattern.split(text)
            if piece
        ]

    def decode(self, ids: Iterable[int], *, keep_special: bool = True) -> str:
        """Text of token ids, control tokens spelled out.

        Args:
            ids: token ids.
            keep_special: False leaves out the tokens that the file marks special.
        """
        shown = [int(i) for i in ids if keep_special or int(i) not in self._hidden]
        return self._backend.decode(shown, skip_special_tokens=False)

    def id_of(self, token: str) -> int | None:
        """Id of one token by its exact spelling, None where the vocabulary lacks it."""
        return self._backend.token_to_id(token)

    def _control_id(self, token: str) -> int:
        found = self._backend.token_to_id(token)
        if found is None:
            raise UserError(f"{self.path}: found no token {token}, expected it: chat rows need it")
        if found not in self._added:
            raise UserError(
                f"{self.path}: {token} is ordinary text (id {found}), expected it in added_tokens; "
                "a message could spell it"
            )
        return found


def train_tokenizer(texts: Iterable[str], path: Path) -> None:
    """Trains a small byte-level tokenizer whose tokens are the words of `texts` that occur twice.

    All 256 bytes are in the vocabulary, so any text survives; letters never share a token with
    spaces or signs, so a word is one and the same token at a start, in a list and inside JSON.

    Args:
        texts: the corpus.
        path: the tokenizer.json to write.
    """
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1 << 16,  # no limit: merging stops where no pair occurs twice
        min_frequency=2,
        special_tokens=[AddedToken(token, special=True) for token in CONTROL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    backend.save(str(path))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"{path}: no such file, expected a tokenizer.json")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(
            f"{path}: found no valid JSON ({error}), expected a tokenizer.json"
        ) from error
    if not isinstance(content, dict) or "model" not in content:
        raise UserError(f'{path}: found JSON without a "model", expected a tokenizer.json')
    return content
