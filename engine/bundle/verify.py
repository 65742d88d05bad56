"""What `transformers` makes of a bundle, in a process of its own: `python -m hymoe.engine.bundle.verify ASKED ANSWER`.

ASKED is a JSON file: `folder`, `conversations` ([messages, whether an answer's header follows]), `on_meta`. ANSWER gets
`renders` (text and ids of each), `eos_token_id` of the tokenizer and of the generation settings, and of the model
`missing`, `unexpected`, `mismatched` tensors. On the meta device nothing is read but headers: names and shapes only.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def verify(folder: str, conversations: list[Any], on_meta: bool) -> dict[str, Any]:
    """Loads and renders; raises whatever `transformers` raises."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    renders = []
    for messages, answer in conversations:
        how = {"add_generation_prompt": answer}
        text = tokenizer.apply_chat_template(messages, tokenize=False, **how)
        ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **how)
        renders.append({"text": text, "ids": list(ids["input_ids"])})
    model, info = AutoModelForCausalLM.from_pretrained(
        folder,
        local_files_only=True,
        output_loading_info=True,
        **({"device_map": "meta"} if on_meta else {"dtype": "auto"}),
    )
    found = {
        "renders": renders,
        "tokenizer_eos_token_id": tokenizer.eos_token_id,
        "generation_eos_token_id": model.generation_config.eos_token_id,
        "parameters": sum(p.numel() for p in model.parameters()),
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(info["unexpected_keys"]),
        "mismatched": sorted(str(key) for key in info["mismatched_keys"]),
    }
    if not on_meta:
        # One forward pass: that it computes, not only that it is there.
        with torch.no_grad():
            logits = model(torch.tensor([renders[0]["ids"]])).logits
        found["finite"] = bool(torch.isfinite(logits).all())
    return found


def main() -> None:
    """Reads ASKED, writes ANSWER."""
    asked = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(sys.argv[2]).write_text(json.dumps(verify(**asked)), encoding="utf-8")


if __name__ == "__main__":
    main()
