"""A reward model: a Hugging Face folder whose head gives a conversation one number.

Each conversation is computed alone. It costs some speed and buys two things: a score depends on nothing but
its text, so a resumed run gives the bits of an unbroken one; and no padding can move the position that the
head reads (where the padding token also ends a turn, it would).
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from hymoe.engine.errors import UserError
from hymoe.engine.eval.scores import Turns

DECIDING = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")  # files that decide a score


class RewardModel:
    """Scores by a sequence-classification model with one output."""

    def __init__(
        self,
        folder: Path,
        *,
        device: str = "cpu",
        dtype: str = "auto",
        max_tokens: int | None = None,
    ) -> None:
        """Loads the model.

        Args:
            folder: local HF folder: config.json, shards, tokenizer files with a chat template.
            device: where to compute.
            dtype: of the weights: auto (as in the files), float32, bfloat16.
            max_tokens: most tokens of a conversation; None: what config.json says, or no limit.

        Raises:
            UserError: no such model, several outputs, tensors that the files lack, no chat template.
        """
        transformers = _transformers()
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise UserError(f"device {device}: found no CUDA device")
        if not (folder / "config.json").is_file():
            raise UserError(f"{folder}: found no config.json, expected a reward model's folder")
        config = _read(folder / "config.json")
        outputs = config.get("num_labels", len(config.get("id2label", ("LABEL_0", "LABEL_1"))))
        if outputs != 1:
            raise UserError(
                f"{folder / 'config.json'}: the head has {outputs} outputs, expected 1 (a reward)"
            )
        try:
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True
            )
            self._model, info = transformers.AutoModelForSequenceClassification.from_pretrained(
                folder, local_files_only=True, dtype=dtype, output_loading_info=True
            )
        except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
            raise UserError(f"{folder}: cannot be loaded ({str(error).splitlines()[0]})") from error
        missing = sorted(info["missing_keys"]) + sorted(map(str, info["mismatched_keys"]))
        if missing:
            raise UserError(
                f"{folder}: {len(missing)} tensors are missing or misshapen, the first is {missing[0]}; "
                "a head that was never trained scores nothing"
            )
        if self._tokenizer.chat_template is None:
            raise UserError(f"{folder}: the tokenizer has no chat template, expected one")
        self._model = self._model.to(device).eval()
        self._max_tokens = max_tokens or config.get("max_position_embeddings")
        self.name = f"reward model {_digest(folder)} {self._model.dtype}"

    def score(self, turns: Turns) -> float:
        """The head's output at the end of the conversation."""
        ids = torch.tensor([self._ids(turns)], device=self._model.device)
        with torch.inference_mode():
            logits = self._model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        return float(logits[0, 0])

    def check(self, conversations: Iterable[Turns]) -> None:
        """Refuses conversations that are longer than the model can read."""
        if self._max_tokens is None:
            return
        lengths = [len(self._ids(turns)) for turns in conversations]
        long = [length for length in lengths if length > self._max_tokens]
        if long:
            raise UserError(
                f"{len(long)} of {len(lengths)} conversations have more tokens than the reward model's "
                f"{self._max_tokens}, the longest {max(long)}; leave these battles out"
            )

    def _ids(self, turns: Turns) -> list[int]:
        text = self._tokenizer.apply_chat_template(list(turns), tokenize=False)
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]


def _transformers() -> Any:
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise UserError(
            "a reward model needs the package transformers: pip install transformers"
        ) from error
    return transformers


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error})") from None


def _digest(folder: Path) -> str:
    """Hash of the names and the content of every file that decides a score."""
    total = hashlib.sha256()
    for path in sorted({path for pattern in DECIDING for path in folder.glob(pattern)}):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        total.update(f"{path.name} {content}\n".encode())
    return total.hexdigest()
