import json
from pathlib import Path

import pytest

from hymoe.engine.data.formats import read_jsonl, read_questions, read_rows
from hymoe.engine.errors import UserError

GOOD = b'{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}'


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_mark_blank_lines_line_ends_and_a_broken_row(tmp_path: Path) -> None:
    broken = b'{"messages": [\n'
    content = b"\xef\xbb\xbf" + GOOD + b"\n" + broken + b"\n" + GOOD + b"\r\n \r\n" + GOOD
    path = write(tmp_path / "data.jsonl", content)
    with pytest.raises(UserError, match=r"data\.jsonl:2: found no valid JSON"):
        list(read_rows(path))
    skipped: list[UserError] = []
    rows = list(read_rows(path, skipped.append))
    assert [row.where.rpartition(":")[2] for row in rows] == ["1", "4", "6"]
    assert [[m.content for m in row.messages] for row in rows] == [["q", "a"]] * 3
    assert len(skipped) == 1
    assert "data.jsonl:2" in str(skipped[0])


def test_text_is_kept_as_it_is(tmp_path: Path) -> None:
    text = " \u2028 line\u2029 \x85 caf\u00e9\r\n\ttab \U0001f600 "
    row = {"messages": [{"role": "user", "content": text}]}
    for ascii_ in (True, False):
        path = tmp_path / "data.jsonl"
        path.write_text(json.dumps(row, ensure_ascii=ascii_), encoding="utf-8", newline="\n")
        (found,) = read_rows(path)
        assert found.messages[0].content == text


def test_rows_are_streamed(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", GOOD + b"\n" + b"broken")
    rows = read_rows(path)
    assert next(rows).messages[1].content == "a"
    with pytest.raises(UserError, match=":2: "):
        next(rows)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (b"[1]", "expected a JSON object"),
        (b'"text"', "expected a JSON object"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b"{}", 'found no keys, expected "messages"'),
        (b'{"text": "x", "id": 1}', 'found id, text, expected "messages"'),
        (b'{"messages": null}', '"messages" is null'),
        (b'{"messages": []}', r'"messages" is \[\]'),
        (b'{"messages": "hi"}', '"messages" is "hi"'),
        (b'{"messages": ["hi"]}', r'"messages"\[0\] is "hi"'),
        (b'{"messages": [{"role": "user"}]}', r'"messages"\[0\] has no content'),
        (b'{"messages": [{"content": "x"}]}', r'"messages"\[0\] has no role'),
        (b'{"messages": [{"role": "bot", "content": "x"}]}', 'role "bot", expected one of system'),
        (b'{"messages": [{"role": ["user"], "content": "x"}]}', r'role \["user"\]'),
        (b'{"messages": [{"role": "user", "content": 3}]}', "content 3, expected text"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "surrogate"),
    ],
)
def test_bad_rows_name_file_line_and_what_was_found(tmp_path: Path, row: bytes, said: str) -> None:
    path = write(tmp_path / "data.jsonl", GOOD + b"\n\n" + row + b"\n")
    with pytest.raises(UserError, match=rf"data\.jsonl:3.*{said}") as caught:
        list(read_rows(path))
    assert "\n" not in str(caught.value)


def test_null_content_is_no_text(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", GOOD.replace(b'"a"', b"null"))
    (row,) = read_rows(path)
    assert row.messages[1].content is None


@pytest.mark.parametrize("content", [b"", b"\n\r\n  \n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"])
def test_empty_file(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(UserError, match=r"data\.jsonl: found no rows"):
        list(read_jsonl(write(tmp_path / "data.jsonl", content)))


def test_missing_file_and_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(UserError, match="no such file"):
            list(read_jsonl(path))


def test_questions(tmp_path: Path) -> None:
    rows = [
        {
            "id": "a",
            "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}],
        },
        {"key": 7, "prompt": "p", "instruction_id_list": []},
    ]
    path = write(tmp_path / "p.jsonl", "\n".join(map(json.dumps, rows)).encode())
    first, second = read_questions(path)
    assert (first.id, [m.role for m in first.messages]) == ("a", ["system", "user"])
    assert (second.id, [(m.role, m.content) for m in second.messages]) == (7, [("user", "p")])


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "p"}, '"id" is null'),
        ({"id": "a"}, "neither"),
        ({"id": "a", "prompt": "p", "messages": []}, "both"),
        ({"id": "a", "prompt": None}, "no text of a user"),
        ({"id": "a", "prompt": 3}, "content 3"),
        ({"id": "a", "messages": [{"role": "assistant", "content": "x"}]}, "no text of a user"),
        ({"id": "0", "prompt": "p"}, "id 0 again"),
    ],
)
def test_bad_questions(tmp_path: Path, row: dict[str, object], said: str) -> None:
    rows = [{"id": 0, "prompt": "p"}, row]
    path = write(tmp_path / "p.jsonl", "\n".join(map(json.dumps, rows)).encode())
    with pytest.raises(UserError, match=rf"p\.jsonl:2.*{said}"):
        list(read_questions(path))
