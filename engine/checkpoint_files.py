"""The folder of a run's saved states: what they are called, which are whole, which are kept.

A state is a folder `step_00000100`. It is written as `.step_00000100.partial`, synced, described by
`manifest.json` (every other file's size and CRC-32, and a CRC-32 of the manifest itself), and renamed: at any
moment of a kill a name without a dot belongs to a whole state or there is none. A state that goes is first
renamed to a name with a dot, so half of one is never taken for a whole. CRC-32 finds damage, not malice.
"""

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hymoe.engine.errors import UserError

FOLDER = "checkpoints"
MANIFEST = "manifest.json"
NAME = re.compile(r"step_(\d{8,})")
LEFTOVER = re.compile(r"\.step_\d{8,}\.(partial|removed)")
READ_BYTES = 1 << 24


def name_of(step: int) -> str:
    """Folder name of the state after a step."""
    return f"step_{step:08d}"


def step_of(path: Path) -> int:
    """Number of the step in a state's name.

    Raises:
        UserError: no such name.
    """
    found = NAME.fullmatch(path.name)
    if found is None:
        raise UserError(f"{path}: not the name of a saved state; expected step_ and eight digits")
    return int(found[1])


def partial_of(folder: Path, step: int) -> Path:
    """Where the state of a step is while it is being written."""
    return folder / f".{name_of(step)}.partial"


def states(folder: Path) -> list[Path]:
    """The states in a folder, newest first, by number and not as text; whole or not."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if path.is_dir() and NAME.fullmatch(path.name)]
    return sorted(found, key=step_of, reverse=True)


def sweep(folder: Path) -> list[str]:
    """Removes what a killed save or removal left behind, and gives its names."""
    if not folder.is_dir():
        return []
    found = sorted(path for path in folder.iterdir() if LEFTOVER.fullmatch(path.name))
    for path in found:
        shutil.rmtree(path)
    return [path.name for path in found]


def measure(path: Path) -> dict[str, int]:
    """Size and CRC-32 of a file."""
    crc = size = 0
    with path.open("rb") as file:
        while chunk := file.read(READ_BYTES):
            crc = zlib.crc32(chunk, crc)
            size += len(chunk)
    return {"bytes": size, "crc32": crc}


def publish(partial: Path, files: dict[str, dict[str, int]], content: dict[str, Any]) -> Path:
    """Makes a written state whole: manifest, sync, rename.

    Args:
        partial: the folder with every file, each synced.
        files: name -> what `measure` says.
        content: what the state is, in JSON types.

    Returns:
        The state's folder.
    """
    body = {**content, "files": files}
    text = json.dumps({"crc32": _crc_of(body), **body}, indent=1)
    with (partial / MANIFEST).open("w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(partial)
    whole = partial.with_name(partial.name.removeprefix(".").removesuffix(".partial"))
    if whole.exists():  # a damaged one that the start of this run has skipped
        remove(whole)
    partial.rename(whole)
    _sync_folder(whole.parent)
    return whole


def remove(state: Path) -> None:
    """Removes a state; a kill in the middle leaves nothing that looks like one."""
    gone = state.with_name(f".{state.name}.removed")
    if gone.exists():
        shutil.rmtree(gone)
    state.rename(gone)
    shutil.rmtree(gone)


def discard(folder: Path, step: int) -> None:
    """Removes what there is of a state that could not be written; what cannot be removed is left to `sweep`."""
    shutil.rmtree(partial_of(folder, step), ignore_errors=True)


def prune(folder: Path, *, keep_last: int, keep_every: int) -> list[str]:
    """Removes all but the newest `keep_last` states and those of every `keep_every`-th step (0: none).

    Returns:
        The names of the removed ones.
    """
    old = states(folder)[keep_last:]
    gone = [path for path in old if not keep_every or step_of(path) % keep_every]
    for path in gone:
        remove(path)
    return [path.name for path in gone]


def read_manifest(state: Path) -> dict[str, Any]:
    """What a state is, by its manifest.

    Raises:
        UserError: no manifest, or a damaged one.
    """
    path = state / MANIFEST
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{state}: has no {MANIFEST}; not a whole state of a run") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    if not isinstance(body, dict) or body.pop("crc32", None) != _crc_of(body):
        raise UserError(f"{path}: damaged, its checksum does not fit its content")
    return body


def fault(state: Path, names: Iterable[str], manifest: dict[str, Any]) -> str | None:
    """What is wrong with some of a state's files; None where nothing is. Sizes are compared first."""
    names = list(names)
    for name in names:
        try:
            size = (state / name).stat().st_size
        except FileNotFoundError:
            return f"{name} is missing"
        expected = manifest["files"][name]["bytes"]
        if size != expected:
            return f"{name} has {size:,} bytes, expected {expected:,}"
    for name in names:
        if measure(state / name) != manifest["files"][name]:
            return f"{name} has another checksum than when it was written"
    return None


def free_bytes(folder: Path) -> int:
    """Room on the disk of a folder."""
    return shutil.disk_usage(folder).free


def _crc_of(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
