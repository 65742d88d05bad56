import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hymoe.engine.data.chat import render, shifted_labels
from hymoe.engine.data.formats import read_rows
from hymoe.engine.data.prepare import prepare_jsonl
from hymoe.engine.data.tokenizer import Tokenizer
from hymoe.engine.errors import UserError


def pair(user: str | None, assistant: str | None) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    }


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_every_kept_document_once_with_its_labels(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [pair("one " * (i % 7), f"two {i}") for i in range(50)])
    rows, stats = prepare_jsonl(path, tokenizer, 64, seed=3)
    expected = []
    for row in read_rows(path):
        if row.messages[0].content:
            ids, mask, _ = render(row.messages, tokenizer)
            expected.append((ids, shifted_labels(ids, mask)))
    found = []
    for i in range(len(rows)):
        input_ids, labels, cu_seqlens = rows[i]
        assert (input_ids.dtype, labels.dtype, cu_seqlens.dtype) == (np.int64, np.int64, np.int32)
        assert len(input_ids) == len(labels) == cu_seqlens[-1] == rows.num_tokens(i) <= 64
        assert rows.supervised_tokens(i) == (labels != -100).sum() > 0
        for a, b in zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True):
            assert labels[b - 1] == -100
            found.append((input_ids[a:b].tolist(), labels[a:b].tolist()))
    assert sorted(found) == sorted(expected)
    assert (stats.rows_read, stats.rows_kept, dict(stats.dropped)) == (50, 42, {"empty_user": 8})
    assert stats.tokens == sum(rows.num_tokens(i) for i in range(len(rows)))
    assert stats.supervised_tokens == sum(rows.supervised_tokens(i) for i in range(len(rows)))
    assert stats.packing_efficiency == stats.tokens / (64 * len(rows))


def test_same_seed_same_rows(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [pair("one", f"two {i}") for i in range(30)])
    (a, _), (b, _), (c, _) = (prepare_jsonl(path, tokenizer, 64, seed=seed) for seed in (1, 1, 2))
    assert all(np.array_equal(x, y) for i in range(len(a)) for x, y in zip(a[i], b[i], strict=True))
    assert any(not np.array_equal(a[i][0], c[i][0]) for i in range(min(len(a), len(c))))


def test_drops_are_counted_by_reason(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [
        pair("one", "two"),
        pair("one", ""),
        pair("one", None),
        pair("-", "two"),
        pair("one " * 100, "two"),
        {"messages": [{"role": "user", "content": "one"}]},
        {"messages": [{"role": "assistant", "content": "one"}]},
    ]
    _, stats = prepare_jsonl(write(tmp_path / "d.jsonl", rows), tokenizer, 64, seed=0)
    assert dict(stats.dropped) == {
        "empty_assistant": 1,
        "null_assistant": 1,
        "empty_user": 1,
        "too_long": 1,
        "no_assistant": 1,
        "role_order": 1,
    }
    assert stats.rows_kept + sum(stats.dropped.values()) == stats.rows_read == 7
    assert "7 rows read, 1 kept (dropped 1 empty_assistant" in stats.summary()
    json.dumps(stats.as_dict())


def test_cut_keeps_no_row_without_a_supervised_token(tokenizer: Tokenizer, tmp_path: Path) -> None:
    header = (
        len(render((), tokenizer)[0])
        + len(tokenizer.encode("user\n"))
        + len(tokenizer.encode("assistant\n"))
    )
    assert header == 4
    # Row 3: 60 tokens before the answer, 20 tokens of answer.
    user = "one " * 26 + "one"
    rows = [pair("one " * 100, "two three"), pair("one", "two"), pair(user, " ".join(["two"] * 10))]
    path = write(tmp_path / "d.jsonl", rows)
    (_, dropped), (packed, cut) = (
        prepare_jsonl(path, tokenizer, 64, 0, too_long=how) for how in ("drop", "cut")
    )
    assert dict(dropped.dropped) == {"too_long": 2}
    assert dict(cut.dropped) == {"no_supervised_token": 1}
    assert (cut.rows_read, cut.rows_kept, cut.rows_cut) == (3, 2, 1)
    ids, mask, _ = render(
        next(r for r in read_rows(path) if r.where.endswith(":3")).messages, tokenizer
    )
    kept = sum(mask[:64])
    assert len(ids) > 64
    assert 0 < kept < sum(mask)
    documents = [packed[i][0][a:b] for i in range(2) for a, b in [packed[i][2][:2]]]
    longest = max(documents, key=len)
    assert longest.tolist() == ids[:64]
    assert tokenizer.im_end not in longest[-5:]
    assert cut.supervised_tokens == kept + 2


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([pair("one", "")], r"nothing left to train on of 1 rows \(1 empty_assistant\)"),
        ([pair("one " * 99, "two")] * 2, r"of 2 rows \(2 too_long\)"),
        ([{"text": "x"}], r'd\.jsonl:1: found text, expected "messages"'),
        ([], "found no rows"),
    ],
)
def test_nothing_to_train_on(
    tokenizer: Tokenizer, tmp_path: Path, rows: list[dict[str, Any]], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        prepare_jsonl(write(tmp_path / "d.jsonl", rows), tokenizer, 64, seed=0)


def test_bad_arguments(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [pair("one", "two")])
    with pytest.raises(UserError, match="too_long = 'split', expected one of drop, cut"):
        prepare_jsonl(path, tokenizer, 64, 0, too_long="split")
    with pytest.raises(UserError, match="seq_len = 1"):
        prepare_jsonl(path, tokenizer, 1, 0)


def test_real_conversations(shared_dir: Path, real_tokenizer: Tokenizer) -> None:
    path = shared_dir / "data" / "chat" / "oasst_en100_messages.jsonl"
    rows, stats = prepare_jsonl(path, real_tokenizer, 4096, seed=0)
    assert (stats.rows_read, stats.rows_kept, dict(stats.dropped)) == (564, 564, {})
    assert stats.packing_efficiency > 0.95
    turns = sum(m.role == "assistant" for row in read_rows(path) for m in row.messages)
    ends = sum(int((rows[i][1] == real_tokenizer.im_end).sum()) for i in range(len(rows)))
    assert ends == turns  # every answer's end is supervised, and nothing else is an end
