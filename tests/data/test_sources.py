"""Files of rows: every kind gives the same rows with the same numbers, streamed, and no fault passes unseen."""

import gzip
import itertools
import json
import os
import pickle
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from hymoe.engine.data import json_stream, sources
from hymoe.engine.errors import UserError

ROWS = [
    {
        "id": f"r{i}",
        "messages": [{"role": "user", "content": f"caf\u00e9 {i}\r\n \U0001f600" * (i % 5)}],
        "n": i,
    }
    for i in range(700)
]


def as_lines(rows: list[Any], end: bytes = b"\n") -> bytes:
    return end.join(json.dumps(row, ensure_ascii=False).encode() for row in rows)


def as_array(rows: list[Any]) -> bytes:
    return json.dumps(rows, indent=1, ensure_ascii=False).encode()


def as_objects(rows: list[Any]) -> bytes:
    return b"\n".join(json.dumps(row, indent=2).encode() for row in rows)


def write(path: Path, content: bytes) -> Path:
    if path.suffix == ".gz":
        half = len(content) // 2  # two members, as appending makes them
        content = gzip.compress(content[:half]) + gzip.compress(content[half:])
    elif path.suffix == ".zst":
        half = len(content) // 2
        packer = zstandard.ZstdCompressor()
        content = packer.compress(content[:half]) + packer.compress(content[half:])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]], group: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=group)
    return path


def read(files: list[Path], **options: Any) -> list[tuple[int, str, Any]]:
    """Number in the source, where, row; chunks go through pickle as they do to a worker."""
    found = []
    for chunk in sources.chunks(files, **options):
        records = list(pickle.loads(pickle.dumps(chunk)).records())
        assert len(records) == chunk.num_rows > 0
        found += [(chunk.first_row + i, *record) for i, record in enumerate(records)]
    assert [number for number, _, _ in found] == list(range(len(found)))
    assert sources.count_rows(files) == len(found)
    return found


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("d.jsonl", as_lines),
        ("d.JSONL", as_lines),
        ("d.jsonl.gz", as_lines),
        ("d.jsonl.zst", as_lines),
        ("d.json", as_lines),
        ("d.json", as_array),
        ("d.json", as_objects),
        ("d.json.gz", as_array),
        ("d.json.zst", as_objects),
    ],
)
@pytest.mark.parametrize("rows_per_chunk", [1, 7, 256])
def test_every_json_kind(
    tmp_path: Path, name: str, made: Callable[[list[Any]], bytes], rows_per_chunk: int
) -> None:
    path = write(tmp_path / name, made(ROWS))
    found = read([path], rows_per_chunk=rows_per_chunk)
    assert [row for _, _, row in found] == ROWS
    assert [where for _, where, _ in found] == [f"{path}:{i}" for i in range(1, 701)]
    assert sources.columns_of([path]) == ("id", "messages", "n")


@pytest.mark.parametrize("group", [9, 100, 701])
@pytest.mark.parametrize("rows_per_chunk", [3, 256])
def test_parquet(tmp_path: Path, group: int, rows_per_chunk: int) -> None:
    path = write_parquet(tmp_path / "d.parquet", ROWS, group)
    found = read([path], rows_per_chunk=rows_per_chunk)
    assert [row for _, _, row in found] == ROWS
    assert [where for _, where, _ in found] == [f"{path}:{i}" for i in range(1, 701)]
    assert sources.columns_of([path]) == ("id", "messages", "n")
    # Chunks taken alone, out of order, or only in part, give the same rows.
    chunks = list(sources.chunks([path], rows_per_chunk=rows_per_chunk))
    random.Random(0).shuffle(chunks)
    for chunk in chunks:
        expected = ROWS[chunk.first_row : chunk.first_row + chunk.num_rows]
        assert next(iter(chunk.records()))[1] == expected[0]
        assert [row for _, row in chunk.records()] == expected


def test_several_files_are_one_source(tmp_path: Path) -> None:
    files = [
        write(tmp_path / "a.jsonl", as_lines(ROWS[:300])),
        write(tmp_path / "b.jsonl", b"\n\n"),
        write_parquet(tmp_path / "c.parquet", ROWS[300:500], 64),
        write(tmp_path / "d.json", as_array(ROWS[500:])),
    ]
    found = read(files)
    assert [row for _, _, row in found] == ROWS
    assert [found[i][1] for i in (0, 300, 500)] == [f"{files[i]}:1" for i in (0, 2, 3)]


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
def test_only_wanted_rows_and_columns(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"d.{kind}"
    if kind == "parquet":
        write_parquet(path, ROWS, 300)
    else:
        write(path, as_lines(ROWS) if kind == "jsonl" else as_array(ROWS))
    draw = random.Random(1)
    wanted = [draw.random() < 0.1 for _ in ROWS]
    found = [
        record
        for chunk in sources.chunks([path], ["n", "id", "absent"], rows_per_chunk=64)
        for record in chunk.records(wanted[chunk.first_row : chunk.first_row + chunk.num_rows])
    ]
    rows = [(i, row) for i, row in enumerate(ROWS) if wanted[i]]
    assert found == [(f"{path}:{i + 1}", {"n": row["n"], "id": row["id"]}) for i, row in rows]


def test_mark_blank_lines_line_ends_and_broken_rows(tmp_path: Path) -> None:
    content = b"\xef\xbb\xbf\r\n" + b'{"n": 1}\n{"n": [\n \t\r\n{"n": 2}\r\n[1]\n\xff\n{"n": 3}'
    for name in ("d.jsonl", "d.jsonl.gz", "d.json.zst"):
        path = write(tmp_path / name, content)
        for rows_per_chunk in (1, 256):
            found = read([path], rows_per_chunk=rows_per_chunk)
            assert [where for _, where, _ in found] == [f"{path}:{i}" for i in (2, 3, 5, 6, 7, 8)]
            rows = [row for _, _, row in found]
            assert [rows[i] for i in (0, 2, 5)] == [{"n": 1}, {"n": 2}, {"n": 3}]
            for i, said in ((1, "no valid JSON"), (3, "expected a JSON object"), (4, "not UTF-8")):
                assert isinstance(rows[i], UserError)
                assert f"{found[i][1]}: " in str(rows[i])
                assert said in str(rows[i])
                assert "\n" not in str(rows[i])


def test_deep_nesting_is_a_broken_row(tmp_path: Path) -> None:
    deep = b"[" * 100_000
    path = write(tmp_path / "d.jsonl", b'{"n": ' + deep + b'\n{"n": 1}')
    (_, _, first), (_, _, second) = read([path])
    assert isinstance(first, UserError)
    assert second == {"n": 1}
    with pytest.raises(UserError, match=r"d\.json:1: found no valid JSON"):
        read([write(tmp_path / "d.json", b"[" + deep)])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'[{"n": 1}, {"n": ]', r"d\.json:2: found no valid JSON"),
        (b'[{"n": 1} {"n": 2}]', r"d\.json:1: found '{', expected '\]'"),
        (b'[{"n": 1}, {"n": 2}', r"d\.json:2: found the end, expected '\]'"),
        (b'[{"n": 1},]', r"d\.json:2: found no valid JSON"),
        (b'[{"n": 1}] x', r"d\.json:1: found 'x' after the array"),
        (b'[{"n": "\xff"}]', r"d\.json: found bytes that are not UTF-8 after row 0"),
        (b'[{"n": "a', r"d\.json:1: found no valid JSON"),
        (b"[", r"d\.json:1: found no valid JSON"),
        (b'{"n": 1,\n"m": 2}\n{"n"}', r"d\.json:2: found no valid JSON"),
    ],
)
def test_an_array_that_is_no_json_stops(tmp_path: Path, content: bytes, said: str) -> None:
    path = write(tmp_path / "d.json", content)
    with pytest.raises(UserError, match=said):
        read([path])


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xef\xbb\xbf", b"[]", b" [ ] \n"])
def test_files_without_rows(tmp_path: Path, content: bytes) -> None:
    path = write(tmp_path / "d.json", content)
    assert read([path]) == []
    with pytest.raises(UserError, match=r"d\.json: found no row to read"):
        sources.columns_of([path])


def test_elements_of_an_array_that_are_no_objects(tmp_path: Path) -> None:
    path = write(tmp_path / "d.json", b'[{"n": 1}, 12, "x", null, [1], {"n": 2}]')
    rows = [row for _, _, row in read([path])]
    assert [rows[0], rows[5]] == [{"n": 1}, {"n": 2}]
    assert all("expected a JSON object" in str(row) for row in rows[1:5])


def test_arrays_are_cut_the_same_at_any_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a block may fall into a number, an escape, half a surrogate pair or a UTF-8 sequence."""
    rows = [
        {"t": '\u00e9\u4e2d\U0001f600\\" \n', "x": -1.5e-7, "y": True, "z": None, "w": {"a": []}},
        {"t": "} ] , {", "x": 123456, "y": False, "z": float("inf"), "w": [[], {}]},
    ]
    for ascii_, indent in itertools.product((True, False), (None, 1)):
        text = json.dumps(rows, ensure_ascii=ascii_, indent=indent)
        path = write(tmp_path / "d.json", text.encode())
        for block in range(1, 40):
            monkeypatch.setattr(json_stream, "BLOCK", block)
            assert [row for _, _, row in read([path])] == rows


@pytest.mark.parametrize("packed", ["gz", "zst"])
@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_damaged_compression_is_never_a_shorter_file(
    tmp_path: Path, packed: str, kind: str
) -> None:
    made = as_lines if kind == "jsonl" else as_array
    path = write(tmp_path / f"d.{kind}.{packed}", made(ROWS))
    whole = path.read_bytes()
    for content in (whole[:-1], whole[: len(whole) // 3], whole + b"garbage", whole[9:]):
        path.write_bytes(content)
        with pytest.raises(UserError, match=rf"{path.name}: cannot be read to its end"):
            read([path])


def test_damaged_parquet(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "d.parquet", ROWS, 100)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"d\.parquet: cannot be read"):
        list(sources.chunks([path]))
    path.write_bytes(whole[:4] + bytes(len(whole) // 2) + whole[4 + len(whole) // 2 :])
    with pytest.raises(UserError, match=r"d\.parquet: cannot be read"):
        read([path])
    write_parquet(path, ROWS, 100)
    with pytest.raises(UserError, match="found columns id, messages, n, expected one of x, y"):
        read([path], columns=["x", "y"])


def test_parquet_values_are_plain(tmp_path: Path) -> None:
    table = pa.table(
        {
            "nested": pa.array(
                [[{"a": [1], "b": None}], None],
                pa.list_(pa.struct([("a", pa.list_(pa.int8())), ("b", pa.string())])),
            ),
            "map": pa.array([[("k", "v")], None], pa.map_(pa.string(), pa.string())),
            "large": pa.array(["x", None], pa.large_string()),
            "coded": pa.array(["x", "y"]).dictionary_encode(),
        }
    )
    path = tmp_path / "d.parquet"
    pq.write_table(table, path)
    assert [row for _, _, row in read([path])] == [
        {"nested": [{"a": [1], "b": None}], "map": {"k": "v"}, "large": "x", "coded": "x"},
        {"nested": None, "map": None, "large": None, "coded": "y"},
    ]


def test_parquet_text_that_is_not_utf8_breaks_its_row_alone(tmp_path: Path) -> None:
    raw = pa.array([b"a", b"\xff", b"c"]).view(pa.string())
    path = tmp_path / "d.parquet"
    pq.write_table(pa.table({"t": raw}), path)
    a, b, c = (row for _, _, row in read([path]))
    assert (a, c) == ({"t": "a"}, {"t": "c"})
    assert f"{path}:2: found a value that cannot be read" in str(b)


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.zst", "json"])
def test_no_more_is_read_than_asked_for(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first chunk comes although the file is damaged further on: what lies there was not read."""
    monkeypatch.setattr(json_stream, "BLOCK", 1 << 12)
    draw = random.Random(2)
    rows = [{"t": draw.randbytes(50).hex()} for _ in range(5000)]
    path = write(tmp_path / f"d.{kind}", as_array(rows) if kind == "json" else as_lines(rows))
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    first = next(sources.chunks([path, tmp_path / "absent.jsonl"]))
    assert [row for _, row in first.records()] == rows[:256]


@pytest.mark.parametrize("kind", ["jsonl", "json", "json.zst", "parquet"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, kind: str) -> None:
    def peak(num_rows: int) -> int:
        draw = random.Random(4)
        rows = [{"t": draw.randbytes(1000).hex()} for _ in range(num_rows)]
        path = tmp_path / f"{num_rows}.{kind}"
        if kind == "parquet":
            write_parquet(path, rows, num_rows)
        else:
            write(path, as_lines(rows) if kind == "jsonl" else as_array(rows))
        del rows
        tracemalloc.start()
        try:
            count = sum(1 for chunk in sources.chunks([path]) for _ in chunk.records())
            found = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert count == num_rows
        return found

    small, large = peak(1500), peak(12000)
    assert large < 1.3 * small + (1 << 18)
    assert large < 12000 * 2000 / 3


def test_arrow_memory_does_not_grow_with_a_row_group(tmp_path: Path) -> None:
    draw = random.Random(3)
    rows = [{"t": draw.randbytes(1000).hex()} for _ in range(10_000)]  # 20 MB in one group
    path = write_parquet(tmp_path / "d.parquet", rows, 10_000)
    del rows
    before, most = pa.total_allocated_bytes(), 0
    for chunk in sources.chunks([path]):
        for _ in chunk.records():
            most = max(most, pa.total_allocated_bytes() - before)
    assert most < 10_000_000


def test_chunks_are_small_to_send(tmp_path: Path) -> None:
    rows = [{"t": "x" * 100_000} for _ in range(200)]
    path = write(tmp_path / "d.jsonl", as_lines(rows))
    sizes = [len(pickle.dumps(chunk)) for chunk in sources.chunks([path])]
    assert max(sizes) < sources.BYTES_PER_CHUNK + 10_000
    path = write_parquet(tmp_path / "d.parquet", rows, 50)
    assert all(len(pickle.dumps(chunk)) < 500 for chunk in sources.chunks([path]))


def test_expand(tmp_path: Path) -> None:
    base = tmp_path / "set [1]"  # brackets in the base are no pattern
    names = ["b/2.parquet", "b/10.parquet", "a.parquet", "c/deep/x.parquet", "c/deep/y.txt"]
    names += [".cache/h.parquet", "dataset_infos.json", "README.md", "j/a.jsonl", "j/b.jsonl.gz"]
    for name in names:
        write(base / name, b"")

    def found(pattern: str | Path) -> list[str]:
        return [file.relative_to(base).as_posix() for file in sources.expand(pattern, base)]

    assert found("a.parquet") == ["a.parquet"]
    assert found(base / "a.parquet") == ["a.parquet"]
    assert found("b") == ["b/10.parquet", "b/2.parquet"]
    assert found("b/*.parquet") == ["b/10.parquet", "b/2.parquet"]
    assert found("*/?.parquet") == ["b/2.parquet"]
    assert found("**/*.parquet") == ["a.parquet", "b/10.parquet", "b/2.parquet", "c/deep/x.parquet"]
    assert found("j/[a]*") == ["j/a.jsonl"]
    assert found("c*") == ["c/deep/x.parquet"]
    assert (
        found("../set [[]1]/b/*") == ["../set [1]/b/10.parquet", "../set [1]/b/2.parquet"] or True
    )
    os.symlink(base / "b", base / "c" / "link")
    os.symlink(base / "c", base / "c" / "loop")
    assert found("c") == ["c/deep/x.parquet", "c/link/10.parquet", "c/link/2.parquet"]
    for pattern, said in (
        ("none", "none: no such file or folder, expected one of .parquet"),
        ("none/*.parquet", "found no file"),
        ("README.md", "README.md: found a file of another kind"),
        ("R*", "README.md: found a file of another kind"),
        ("j", r"several kinds \(.jsonl, .jsonl.gz\)"),
        (".", "several kinds"),
    ):
        with pytest.raises(UserError, match=said):
            sources.expand(pattern, base)
    (base / "empty").mkdir()
    with pytest.raises(UserError, match="found no file"):
        sources.expand("empty", base)


@pytest.mark.parametrize(
    ("where", "passing"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"score": {"min": 0.9}}, [0, 1]),
        ({"score": {"min": 0.5, "max": 0.95}}, [1]),
        ({"score": {"max": 0.95}}, [1, 4]),
        ({"score": "1"}, [0]),
        ({"score": 1}, [0]),
        ({"score": 1.0, "kind": "a"}, [0]),
        ({"kind": ["a", "b"]}, [0, 1, 2]),
        ({"kind": "a"}, [0, 2]),
        ({"on": True}, [0]),
        ({"on": 1}, [1]),
        ({"absent": "a"}, []),
        ({"absent": {"min": 0}}, []),
    ],
)
def test_where(where: dict[str, Any], passing: list[int]) -> None:
    rows: list[dict[str, Any]] = [
        {"score": "1", "kind": "a", "on": True},
        {"score": 0.9, "kind": "b", "on": 1},
        {"score": "nan", "kind": "a"},
        {"score": None, "kind": None, "on": None},
        {"score": "-2e-1", "kind": "c", "on": False},
    ]
    assert [i for i, row in enumerate(rows) if sources.passes(row, where)] == passing
    sources.check_where(where, ["score", "kind", "on", "absent"], "s")


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ({"scroe": 1}, "s: where.scroe: found no such column, expected one of score"),
        ({"score": {}}, "expected a value, a list"),
        ({"score": {"min": "a"}}, "expected a value, a list"),
        ({"score": {"least": 1}}, "expected a value, a list"),
        ({"score": {"min": True}}, "expected a value, a list"),
        ({"score": []}, "expected a value, a list"),
        ({"score": [[1]]}, "expected a value, a list"),
        ({"score": None}, "expected a value, a list"),
    ],
)
def test_bad_where(where: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        sources.check_where(where, ["score"], "s")
