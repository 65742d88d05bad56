"""What files a folder holds and where they came from: sha256 by several threads, and the revision of a checkpoint.

Hashing releases the interpreter, so it runs beside training: one thread reads a base of 63 GB in about a minute, long
before a run of that size ends, and takes one of its cores meanwhile.
"""

import hashlib
import json
import re
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hymoe.engine.errors import UserError
from hymoe.engine.hf_checkpoint import Checkpoint

SMALL_BYTES = 64 << 20  # hashed at once; larger files in the background
READERS = 8  # of files that have just been written and are still in memory
COMMIT = re.compile(r"[0-9a-f]{40}")

Described = dict[str, dict[str, Any]]  # file name -> {"bytes", "sha256"}


def sha256_of(path: Path) -> str:
    """The hash of a file.

    Raises:
        UserError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def described(folder: Path, names: Iterable[str]) -> Described:
    """Size and hash of files of a folder, several read at once.

    Raises:
        UserError: one cannot be read.
    """
    names = sorted(names)
    with ThreadPoolExecutor(READERS) as pool:
        hashes = list(pool.map(lambda name: sha256_of(folder / name), names))
    return {
        name: {"bytes": (folder / name).stat().st_size, "sha256": digest}
        for name, digest in zip(names, hashes, strict=True)
    }


class BackgroundHashes:
    """Hashes of a checkpoint's files: small ones now, shards by a thread while the caller goes on."""

    def __init__(self, checkpoint: Checkpoint, known: Mapping[str, str] | None = None) -> None:
        """Starts; files of the folder that are neither small nor shards of the checkpoint are left out.

        Args:
            checkpoint: the folder.
            known: shards whose sha256 has been checked already; they are not read again.
        """
        self._folder = checkpoint.folder
        shards = {entry.file.name for entry in checkpoint.entries.values()}
        sizes = {
            path.name: path.stat().st_size
            for path in checkpoint.folder.iterdir()
            if path.is_file() and not path.name.startswith(".")
        }
        self._files: Described = {
            name: {"bytes": size, "sha256": None}
            for name, size in sorted(sizes.items())
            if name in shards or size <= SMALL_BYTES
        }
        self._hash([name for name in self._files if name not in shards])
        for name, digest in (known or {}).items():
            self._files[name]["sha256"] = digest
        waiting = [name for name in self._files if name in shards and name not in (known or {})]
        self._thread = threading.Thread(target=self._hash, args=(waiting,), daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to hash."""
        return not self._thread.is_alive()

    def result(self, seconds: float) -> Described:
        """What is known after waiting so long at the most: `sha256` is None, or `error` says why there is none."""
        self._thread.join(seconds)
        return {name: dict(values) for name, values in self._files.items()}

    def _hash(self, names: list[str]) -> None:
        for name in names:
            try:
                self._files[name]["sha256"] = sha256_of(self._folder / name)
            except UserError as error:
                self._files[name]["error"] = str(error)


def revision_of(folder: Path) -> dict[str, str] | None:
    """Which revision of which repository a checkpoint folder is, and what says so; None where nothing does.

    Asked in this order: a download cache's folder name, the note that a download left beside a file, git, config.json.
    """
    real = folder.resolve()
    cache = real.parent.parent.name
    if real.parent.name == "snapshots" and COMMIT.fullmatch(real.name):
        repository = cache.removeprefix("models--").replace("--", "/")
        return {"revision": real.name, "repository": repository, "from": "download cache"}
    note = real / ".cache" / "huggingface" / "download" / "config.json.metadata"
    if note.is_file() and (found := COMMIT.match(note.read_text(encoding="utf-8"))):
        return {"revision": found[0], "from": note.relative_to(real).as_posix()}
    if commit := _git_commit(real / ".git"):
        return {"revision": commit, "from": ".git"}
    config = json.loads((real / "config.json").read_text(encoding="utf-8"))
    commit = str(config.get("_commit_hash") or "")
    return {"revision": commit, "from": "config.json"} if COMMIT.fullmatch(commit) else None


def _git_commit(git: Path) -> str | None:
    """The commit that is checked out; None where there is none or it is not written plainly."""
    if not (git / "HEAD").is_file():
        return None
    head = (git / "HEAD").read_text(encoding="utf-8").strip()
    if head.startswith("ref: "):
        name = head.removeprefix("ref: ")
        packed = git / "packed-refs"
        if (git / name).is_file():
            head = (git / name).read_text(encoding="utf-8").strip()
        elif packed.is_file():
            lines = (line.split(" ") for line in packed.read_text(encoding="utf-8").splitlines())
            head = next((line[0] for line in lines if line[1:] == [name]), "")
    return head if COMMIT.fullmatch(head) else None
