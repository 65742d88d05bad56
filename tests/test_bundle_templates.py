"""The check of templates refuses no good bundle: a real tokenizer, as we and `transformers` render with it."""

import json
from pathlib import Path

import pytest

from hymoe.engine.bundle import check as bundle_check
from hymoe.engine.data.chat import CHAT_TEMPLATE
from hymoe.engine.data.tokenizer import Tokenizer


@pytest.mark.slow
@pytest.mark.parametrize("template", ["chatml", "its own"])
def test_a_real_tokenizer_renders_alike_in_transformers(
    shared_dir: Path, tmp_path: Path, template: str
) -> None:
    """So that the check refuses no good bundle: signs at the start of a prompt, every script, default prompts."""
    from transformers import AutoTokenizer

    source = shared_dir / "data" / "tokenizers"
    own = (source / "smollm2_135m_instruct.chat_template.jinja").read_text()
    tokenizer = source / "smollm2_135m_instruct.tokenizer.json"
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    settings["chat_template"] = CHAT_TEMPLATE if template == "chatml" else own
    (tmp_path / "chat_template.jinja").write_text(settings["chat_template"])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "system_prompt.txt").write_text("# Rules\n\n- Be brief.")
    conversations = bundle_check._conversations(tmp_path)
    ours = bundle_check._render(tmp_path, Tokenizer(tmp_path), conversations)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for (messages, answer), our in zip(conversations, ours, strict=True):
        how = {"add_generation_prompt": answer}
        assert theirs.apply_chat_template(messages, tokenize=False, **how) == our["text"]
        ids = theirs.apply_chat_template(messages, tokenize=True, return_dict=True, **how)
        assert list(ids["input_ids"]) == our["ids"]
