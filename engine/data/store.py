"""Packed rows on disk: token shards that are memory-mapped, an index, and the manifest that vouches for both.

**Layout** of a folder:

    manifest.json             sizes, hashes, statistics; written last, so a folder that has one is whole
    tokens_00000.bin ...      int32 little-endian ids, row after row; a row never spans two files
    labels_00000.bin ...      uint8, 1 where the id that follows is trained on
    rows.npy                  int64 (rows+1,), first token of each row
    documents.npy             int64 (documents+1,), first token of each document
    row_documents.npy         int64 (rows+1,), first document of each row
    supervised.npy            int32 (rows,), trained tokens of each row

A label is the next id of the same document or -100, so one bit a token says it. `dataset_sha256` covers ids, labels
and boundaries row by row, in order: two folders with the same hash train the same.
"""

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from hymoe.engine.data.chat import NOT_SUPERVISED
from hymoe.engine.errors import UserError

FORMAT = "hymoe packed rows 1"
SHARD_TOKENS = 1 << 28  # 1 GiB of ids
MANIFEST = "manifest.json"
_TOKEN = np.dtype("<i4")


class PackedWriter:
    """Writes a folder under another name and renames it when it is whole."""

    def __init__(self, folder: Path | str, seq_len: int, shard_tokens: int = SHARD_TOKENS) -> None:
        """Opens a fresh folder `FOLDER.partial`; one that an interrupted run left is removed.

        Raises:
            UserError: the folder exists.
        """
        self.folder = Path(folder)
        if self.folder.exists():
            raise UserError(f"{self.folder}: exists; choose another folder or remove it")
        self.partial = self.folder.with_name(self.folder.name + ".partial")
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir(parents=True)
        self.seq_len, self.shard_tokens = seq_len, shard_tokens
        self._hash = hashlib.sha256()
        self._files: list[dict[str, Any]] = []  # {"tokens": .., "rows": ..} of each shard
        self._open: tuple[BinaryIO, BinaryIO] | None = None
        self._rows, self._documents, self._row_documents = [0], [0], [0]
        self._supervised: list[int] = []

    def add(self, documents: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """Writes one row.

        Args:
            documents: (ids, trained) of each document; trained[t] says whether the answer to come includes token t.
        """
        lengths = [len(ids) for ids, _ in documents]
        tokens = sum(lengths)
        if not 0 < tokens <= self.seq_len or not all(lengths):
            raise ValueError(f"a row of {lengths} tokens, expected 1 to {self.seq_len} in all")
        if self._open is None or self._files[-1]["tokens"] + tokens > self.shard_tokens:
            self._next_shard()
        ids = np.concatenate([ids for ids, _ in documents]).astype(_TOKEN)
        # A label belongs to the token before: the last one of a document has none.
        labels = np.concatenate([np.append(trained[1:], False) for _, trained in documents]).astype(
            np.uint8
        )
        cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(_TOKEN)
        for data in (cu_seqlens, ids, labels):
            self._hash.update(data.tobytes())
        assert self._open is not None
        self._open[0].write(ids.tobytes())
        self._open[1].write(labels.tobytes())
        self._files[-1]["tokens"] += tokens
        self._files[-1]["rows"] += 1
        self._documents += (self._rows[-1] + cu_seqlens[1:].astype(np.int64)).tolist()
        self._rows.append(self._rows[-1] + tokens)
        self._row_documents.append(self._row_documents[-1] + len(documents))
        self._supervised.append(int(labels.sum()))

    def finish(self, **described: Any) -> dict[str, Any]:
        """Writes index and manifest and gives the folder its name.

        Args:
            described: what else the manifest says: recipe, statistics, tokenizer.

        Returns:
            The manifest.
        """
        self._close()
        index = {
            "rows": np.array(self._rows, dtype="<i8"),
            "documents": np.array(self._documents, dtype="<i8"),
            "row_documents": np.array(self._row_documents, dtype="<i8"),
            "supervised": np.array(self._supervised, dtype="<i4"),
        }
        for name, array in index.items():
            np.save(self.partial / f"{name}.npy", array)
        tokens = self._rows[-1]
        manifest = {
            "format": FORMAT,
            "dataset_sha256": self._hash.hexdigest(),
            "seq_len": self.seq_len,
            "rows": len(self._supervised),
            "documents": len(self._documents) - 1,
            "tokens": tokens,
            "supervised_tokens": int(index["supervised"].sum()),
            "packing_efficiency": round(tokens / max(1, len(self._supervised) * self.seq_len), 6),
            "shards": self._files,
            **described,
        }
        text = json.dumps(manifest, indent=1, ensure_ascii=False) + "\n"
        (self.partial / MANIFEST).write_text(text, encoding="utf-8")
        self.partial.rename(self.folder)
        return manifest

    def abandon(self) -> None:
        """Removes what was written."""
        self._close()
        shutil.rmtree(self.partial, ignore_errors=True)

    def _next_shard(self) -> None:
        self._close()
        number = len(self._files)
        self._open = (
            (self.partial / f"tokens_{number:05d}.bin").open("wb"),
            (self.partial / f"labels_{number:05d}.bin").open("wb"),
        )
        self._files.append({"tokens": 0, "rows": 0})

    def _close(self) -> None:
        for file in self._open or ():
            file.close()
        self._open = None


class PackedRows:
    """A folder of packed rows, memory-mapped; satisfies `rows.Rows`.

    Attributes:
        folder: where they are.
        manifest: what the folder says of itself.
        seq_len: most tokens of a row.
        row_documents: (rows+1,) int64, number of the first document of each row.
    """

    def __init__(self, folder: Path | str) -> None:
        """Opens the folder and compares the sizes of its files with the manifest.

        Raises:
            UserError: no manifest, another format, a file that is missing or has another size.
        """
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        self.seq_len = int(self.manifest["seq_len"])
        rows, documents = self.manifest["rows"], self.manifest["documents"]
        self._rows = self._index("rows", rows + 1)
        self._documents = self._index("documents", documents + 1)
        self.row_documents = self._index("row_documents", rows + 1)
        self._supervised = self._index("supervised", rows)
        shards = self.manifest["shards"]
        self._tokens, self._labels = [], []
        for number, shard in enumerate(shards):
            self._tokens.append(self._map(f"tokens_{number:05d}.bin", _TOKEN, shard["tokens"]))
            self._labels.append(self._map(f"labels_{number:05d}.bin", np.uint8, shard["tokens"]))
        self._first_row = np.cumsum([0, *(shard["rows"] for shard in shards)])
        if self._first_row[-1] != rows or self._rows[-1] != self.manifest["tokens"]:
            raise UserError(
                f"{self.folder / MANIFEST}: counts do not match the index; prepare again"
            )

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._supervised)

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """One row: input_ids (T,) int64, labels (T,) int64 shifted, cu_seqlens (S+1,) int32."""
        ids, trained, cu_seqlens = self._row(i)
        ids = ids.astype(np.int64)
        following = np.append(ids[1:], NOT_SUPERVISED)
        return ids, np.where(trained != 0, following, NOT_SUPERVISED), cu_seqlens

    def num_tokens(self, i: int) -> int:
        """Tokens of row i."""
        return int(self._rows[i + 1] - self._rows[i])

    def supervised_tokens(self, i: int) -> int:
        """Labels of row i that are not -100."""
        return int(self._supervised[i])

    def summary(self) -> str:
        """One line for a person."""
        m = self.manifest
        return (
            f"{self.folder}: {len(m['sources'])} sources, {m['documents']:,} documents; {m['tokens']:,} tokens, "
            f"{m['supervised_tokens']:,} supervised; {m['rows']:,} packed rows of {self.seq_len:,}, "
            f"{m['packing_efficiency']:.1%} full; sha256 {m['dataset_sha256'][:16]}"
        )

    def as_dict(self) -> dict[str, Any]:
        """The manifest without its shards, for a log."""
        return {key: value for key, value in self.manifest.items() if key != "shards"}

    def verify(self) -> list[str]:
        """Reads everything; what is wrong, one line each, empty where all is as the manifest says."""
        found, digest = [], hashlib.sha256()
        for i in range(len(self)):
            ids, trained, cu_seqlens = self._row(i)
            for data in (cu_seqlens.astype(_TOKEN), ids, trained):
                digest.update(data.tobytes())
            if int(trained.sum()) != self._supervised[i]:
                found.append(
                    f"row {i}: {int(trained.sum())} trained tokens, index says {self._supervised[i]}"
                )
            if not trained.any():
                found.append(f"row {i}: no token is trained on")
            if trained[cu_seqlens[1:] - 1].any():
                found.append(f"row {i}: a document's last token has a label")
            if not 0 < len(ids) <= self.seq_len:
                found.append(f"row {i}: {len(ids)} tokens, expected 1 to {self.seq_len}")
        if digest.hexdigest() != self.manifest["dataset_sha256"]:
            found.append(
                f"dataset_sha256 is {digest.hexdigest()}, manifest says {self.manifest['dataset_sha256']}"
            )
        return found

    def _row(self, i: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if not -len(self) <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        i %= len(self)
        shard = int(np.searchsorted(self._first_row, i, side="right")) - 1
        base = self._rows[self._first_row[shard]]
        part = slice(int(self._rows[i] - base), int(self._rows[i + 1] - base))
        first, last = self.row_documents[i], self.row_documents[i + 1]
        cu_seqlens = (self._documents[first : last + 1] - self._rows[i]).astype(np.int32)
        return self._tokens[shard][part], self._labels[shard][part], cu_seqlens

    def _index(self, name: str, size: int) -> np.ndarray:
        path = self.folder / f"{name}.npy"
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: cannot be read ({error}); prepare the data again") from None
        if array.shape != (size,):
            raise UserError(f"{path}: has shape {array.shape}, the manifest says ({size},)")
        return array

    def _map(self, name: str, dtype: Any, size: int) -> np.ndarray:
        path = self.folder / name
        want = size * np.dtype(dtype).itemsize
        if not path.is_file() or path.stat().st_size != want:
            have = f"{path.stat().st_size} bytes" if path.is_file() else "no such file"
            raise UserError(
                f"{path}: {have}, the manifest says {want} bytes; prepare the data again"
            )
        return np.memmap(path, dtype=dtype, mode="r")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder of packed rows.

    Raises:
        UserError: there is none, or it is none of this version's.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}); expected a folder that prepare_data.py wrote"
        ) from None
    except ValueError as error:
        raise UserError(f"{path}: no valid JSON ({error}); prepare the data again") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise UserError(f"{path}: format {manifest.get('format')!r}, expected {FORMAT!r}")
    return manifest
