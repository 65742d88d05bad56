"""Hashes of a checkpoint's weight files, where something states them, compared before a run loads the files.

Headers and sizes show that a file is whole, not that no bit of its data has turned. What states a hash, the first that
names a file counts:

1. `training_evidence.json` or `evidence.json` in the folder, under `weights` or `files`: name -> {"bytes", "sha256"};
2. `evidence.json` of the run that the folder is the export of, one folder up, under `export`;
3. `SHA256SUMS` and `*.sha256` in the folder, as sha256sum writes them;
4. a download cache: the link of a large file leads to a blob whose name is its sha256.

A file that none of them names is not checked. The ranks share the files, and what they read is in memory when it is
loaded: 63 GB on 4 ranks is 16 GB each, at 1 to 2 GB/s.
"""

import hashlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hymoe.engine.errors import UserError
from hymoe.engine.hf_header import described, opened, parse_json
from hymoe.engine.hf_index import Checkpoint, contained

EVIDENCE = ("training_evidence.json", "evidence.json")
SUMS = "SHA256SUMS"
SUMS_SUFFIX = ".sha256"
SUMS_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")
DIGEST = re.compile(r"[0-9a-f]{64}")
MOST_BYTES = 64 << 20  # of a file that states hashes
READ_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Stated:
    """What a weight file should be.

    Attributes:
        sha256: 64 lower-case hexadecimal digits.
        by: the file that says so.
    """

    sha256: str
    by: Path


def states_hashes(name: str) -> bool:
    """Whether a file of this name speaks of the files beside it, and would be wrong beside others."""
    return name in (*EVIDENCE, SUMS) or name.endswith(SUMS_SUFFIX)


def stated(checkpoint: Checkpoint) -> dict[Path, Stated]:
    """The weight files whose hashes are known, by the rule in this file's head; reads no weights.

    Raises:
        UserError: what states them cannot be read, or has something else in a hash's place.
    """
    folder = checkpoint.folder
    names = sorted({entry.file.name for entry in checkpoint.entries.values()})
    found: dict[str, Stated] = {}
    for source, hashes in [
        *_from_evidence(folder),
        *_from_sums(folder),
        *_from_cache(folder, names),
    ]:
        for name, digest in hashes.items():
            if name not in names or name in found:
                continue
            if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
                raise UserError(
                    f"{source}: sha256 of {name} is {described(digest)}; expected 64 hexadecimal digits"
                )
            found[name] = Stated(digest, source)
    return {folder / name: found[name] for name in names if name in found}


def fault(
    files: dict[Path, Stated],
    rank: int = 0,
    ranks: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> str | None:
    """Reads this rank's share of the files.

    Args:
        files: from `stated`.
        rank: this one.
        ranks: how many share the work.
        progress: called with (bytes read, bytes to read) of this rank.

    Returns:
        What is wrong with the first file that is not what it should be; None where all are.

    Raises:
        UserError: a file cannot be opened.
    """
    mine = list(files.items())[rank::ranks]
    total, done = sum(file.stat().st_size for file, _ in mine), 0
    buffer = memoryview(bytearray(READ_BYTES))
    for file, expected in mine:
        digest, at = hashlib.sha256(), 0
        with opened(file) as fd:
            while count := os.preadv(fd, [buffer], at):
                digest.update(buffer[:count])
                at += count
                if progress is not None:
                    progress(done + at, total)
        done += at
        if digest.hexdigest() != expected.sha256:
            return (
                f"{file}: its sha256 is {digest.hexdigest()}, {expected.by} states {expected.sha256}: "
                "the file has changed or was damaged; fetch it again"
            )
    return None


def _from_evidence(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    found = []
    for name in EVIDENCE:
        content = _evidence(folder / name) if contained(folder, name) else None
        if content is not None:
            found += [(folder / name, _digests(content.get(key))) for key in ("weights", "files")]
    run = folder.resolve().parent / "evidence.json"
    export = (_evidence(run) or {}).get("export")
    if isinstance(export, dict) and export.get("folder") == folder.resolve().name:
        found.append((run, _digests(export.get("weights"))))
    return found


def _evidence(file: Path) -> dict[str, Any] | None:
    """The content of a file of evidence; None where there is none, or it is no object."""
    if not file.is_file():
        return None
    content = parse_json(file, _content(file))
    return content if isinstance(content, dict) else None


def _digests(files: Any) -> dict[str, Any]:
    """File name -> hash of {"bytes", "sha256"}; one that was not known when it was written is left out."""
    if not isinstance(files, dict):
        return {}
    digests = {n: about.get("sha256") for n, about in files.items() if isinstance(about, dict)}
    return {name: digest for name, digest in digests.items() if digest is not None}


def _from_sums(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    found = []
    for file in sorted(folder.iterdir()):
        is_sums = states_hashes(file.name) and file.name not in EVIDENCE
        if is_sums and file.is_file() and contained(folder, file.name):
            text = _content(file).decode("utf-8", errors="replace")
            lines = [match for line in text.splitlines() if (match := SUMS_LINE.fullmatch(line))]
            hashes = {match[2].removeprefix("./"): match[1].lower() for match in lines}
            found.append((file, hashes))
    return found


def _from_cache(folder: Path, names: list[str]) -> list[tuple[Path, dict[str, Any]]]:
    """Of links into `blobs/` those with a sha256 as name; small files have a shorter one there, of git's."""
    blobs = {name: Path(os.path.realpath(folder / name)) for name in names}
    return [
        (blob.parent, {name: blob.name})
        for name, blob in blobs.items()
        if blob.parent.name == "blobs" and DIGEST.fullmatch(blob.name)
    ]


def _content(file: Path) -> bytes:
    with opened(file) as fd:
        size = os.fstat(fd).st_size
        if size > MOST_BYTES:
            raise UserError(f"{file}: {size} bytes; expected at most {MOST_BYTES}")
        return os.pread(fd, size, 0)
