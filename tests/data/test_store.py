"""Packed rows on disk: what is written is what is read, and what is damaged is refused or named."""

import json
from pathlib import Path

import numpy as np
import pytest

from hymoe.engine.data.rows import MemoryRows
from hymoe.engine.data.store import PackedRows, PackedWriter
from hymoe.engine.errors import UserError

SEQ_LEN = 12


def documents(seed: int, sizes: tuple[int, ...]) -> list[tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(seed)
    found = []
    for size in sizes:
        trained = random.random(size) < 0.5
        trained[-1] = True  # a document without an answer is never packed
        found.append((random.integers(0, 1 << 17, size).astype(np.int32), trained))
    return found


ROWS = [documents(1, (5, 7)), documents(2, (12,)), documents(3, (2, 2, 3)), documents(4, (9,))]


def write(folder: Path, shard_tokens: int = 1 << 20, **described) -> dict:
    writer = PackedWriter(folder, SEQ_LEN, shard_tokens)
    for row in ROWS:
        writer.add(row)
    return writer.finish(sources=[], **described)


def as_memory() -> MemoryRows:
    flat = [document for row in ROWS for document in row]
    labels = [(ids.tolist(), [*np.where(on[1:], ids[1:], -100).tolist(), -100]) for ids, on in flat]
    starts = np.cumsum([0, *(len(row) for row in ROWS)])
    packing = [range(a, b) for a, b in zip(starts[:-1], starts[1:], strict=True)]
    return MemoryRows(labels, packing, SEQ_LEN)


@pytest.mark.parametrize("shard_tokens", [12, 20, 1 << 20], ids=["many", "some", "one"])
def test_rows_come_back_as_they_went_in(tmp_path: Path, shard_tokens: int) -> None:
    manifest = write(tmp_path / "packed", shard_tokens)
    rows, expected = PackedRows(tmp_path / "packed"), as_memory()
    assert len(manifest["shards"]) == {12: 4, 20: 3}.get(shard_tokens, 1)
    assert len(rows) == len(expected) == 4
    assert rows.seq_len == SEQ_LEN
    for i in range(4):
        for found, want in zip(rows[i], expected[i], strict=True):
            assert found.dtype == want.dtype
            np.testing.assert_array_equal(found, want)
        assert rows.num_tokens(i) == expected.num_tokens(i)
        assert rows.supervised_tokens(i) == expected.supervised_tokens(i)
    assert manifest["tokens"] == sum(map(expected.num_tokens, range(4)))
    assert manifest["supervised_tokens"] == sum(map(expected.supervised_tokens, range(4)))
    assert rows.verify() == []


def test_the_hash_is_of_content_and_order_not_of_files(tmp_path: Path) -> None:
    one = write(tmp_path / "one")["dataset_sha256"]
    assert write(tmp_path / "many", 12)["dataset_sha256"] == one
    writer = PackedWriter(tmp_path / "other", SEQ_LEN)
    for row in reversed(ROWS):
        writer.add(row)
    assert writer.finish(sources=[])["dataset_sha256"] != one


def test_a_folder_appears_only_whole(tmp_path: Path) -> None:
    writer = PackedWriter(tmp_path / "packed", SEQ_LEN)
    writer.add(ROWS[0])
    assert not (tmp_path / "packed").exists()
    writer.abandon()
    assert list(tmp_path.iterdir()) == []
    write(tmp_path / "packed")
    with pytest.raises(UserError, match="packed: exists; choose another folder"):
        PackedWriter(tmp_path / "packed", SEQ_LEN)


def test_a_row_too_long_is_refused(tmp_path: Path) -> None:
    writer = PackedWriter(tmp_path / "packed", SEQ_LEN)
    with pytest.raises(ValueError, match="expected 1 to 12"):
        writer.add(documents(5, (7, 6)))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "manifest.json").unlink(), r"manifest.json: cannot be read"),
        (lambda f: (f / "manifest.json").write_text("{"), r"manifest.json: no valid JSON"),
        (lambda f: (f / "manifest.json").write_text('{"format": 2}'), "format 2, expected 'hymoe"),
        (lambda f: (f / "tokens_00000.bin").unlink(), "tokens_00000.bin: no such file"),
        (
            lambda f: _cut(f / "labels_00000.bin"),
            r"labels_00000.bin: 39 bytes, the manifest says 40",
        ),
        (lambda f: (f / "rows.npy").unlink(), "rows.npy: cannot be read"),
        (lambda f: np.save(f / "rows.npy", np.zeros(3)), r"rows.npy: has shape \(3,\)"),
    ],
)
def test_a_damaged_folder_is_refused(tmp_path: Path, damage, message: str) -> None:
    write(tmp_path / "packed")
    damage(tmp_path / "packed")
    with pytest.raises(UserError, match=message):
        PackedRows(tmp_path / "packed")


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def test_verify_finds_changed_bytes(tmp_path: Path) -> None:
    write(tmp_path / "packed")
    file = tmp_path / "packed" / "tokens_00000.bin"
    content = bytearray(file.read_bytes())
    content[8] ^= 1
    file.write_bytes(content)
    assert [line[:17] for line in PackedRows(tmp_path / "packed").verify()] == ["dataset_sha256 is"]


def test_verify_finds_a_row_that_trains_nothing(tmp_path: Path) -> None:
    write(tmp_path / "packed")
    file = tmp_path / "packed" / "labels_00000.bin"
    content = bytearray(file.read_bytes())
    content[12:24] = bytes(12)  # the second row's
    file.write_bytes(content)
    found = PackedRows(tmp_path / "packed").verify()
    assert "row 1: no token is trained on" in found
    assert any(line.startswith("row 1: 0 trained tokens, index says") for line in found)


def test_the_manifest_is_plain_json(tmp_path: Path) -> None:
    write(tmp_path / "packed", recipe={"name": "Gr\u00fc\u00dfe"})
    content = json.loads((tmp_path / "packed" / "manifest.json").read_text(encoding="utf-8"))
    assert content["recipe"] == {"name": "Gr\u00fc\u00dfe"}
