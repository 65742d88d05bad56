"""Mutated safetensors headers and index files: refused in one line, or read as an independent reader reads them.

Never another exception, a hang, memory that a file only claims to need, or a file outside of the folder. The other
reader of a header is the safetensors package; the other reader of an index is a few lines below.
"""

import json
import os
import random
import resource
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors

from hymoe.engine.errors import UserError
from hymoe.engine.hf_header import BITS, read_header
from hymoe.engine.hf_index import INDEX, SINGLE, Checkpoint

HEADERS, BATCH, INDICES = 12_000, 1_500, 3_000
CPU_SECONDS, SECONDS, BYTES = (
    5.0,
    60.0,
    256 << 20,
)  # that one input may take: far more than any needs
TIMERS = {
    signal.ITIMER_PROF: (signal.SIGPROF, CPU_SECONDS),
    signal.ITIMER_REAL: (signal.SIGALRM, SECONDS),
}
Found = dict[str, tuple[str, tuple[int, ...], bytes]]  # name -> dtype, shape, data

# Why a header may be refused that the package reads: two readers might differ, or it fits in no message.
STRICTER = (
    "occurs twice",
    "printable characters",
    "expected dtype, shape and data_offsets",  # a key more, more than 64 dimensions, a number above 2^63
    "expected an object of strings",  # null
    "the number",
)


class Raw(str):
    """JSON text that goes into a header as it is."""


class Pairs(list):
    """An object with its keys in order, each as often as it is there."""


def dumps(value: Any) -> str:
    if isinstance(value, Raw):
        return value
    if isinstance(value, Pairs):
        return "{" + ",".join(f"{dumps(key)}:{dumps(inner)}" for key, inner in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(dumps, value)) + "]"
    return json.dumps(value)


# Values that stand where another should.
ODD = [
    *(None, True, False, "", "3", "F32", 0, -1, 1.0, 4.0, 1e30, 2**31, 2**32, 2**53, 2**63 - 1, 2**63),
    *(2**64 - 1, 2**64, 10**30, [], [0], [0, 16], [16, 0], ["0", "16"], [0, 16, 16], [[]], Pairs()),
    *(Pairs([("a", 1)]), Pairs([("dtype", "F32")])),
    *map(Raw, ("NaN", "Infinity", "-Infinity", "-0", "1e999", "1E2", "0x10", "01", "+1", "1_0", "1.")),
    *map(Raw, ("9" * 5000, '"\\ud800"', '"\\ud83d\\ude00"', '"\\u0000"', '"\t"', "'a'", "[" * 5000)),
    *(Raw("[" * 200 + "]" * 200), Raw("[" * 900 + "]" * 900), Raw('{"a":' * 300 + "1" + "}" * 300)),
]  # fmt: skip
NAMES = [
    *("a", "", "__metadata__", "../x", "/etc/passwd", "a\nb", "a\x1b[2J", "a" * 600, "\u00e9", "\U0001f600"),
    *map(Raw, ('"\\ud800"', '"\\u0061"', '"a\\u0000"', "3", "null", '"a\tb"')),
]  # fmt: skip


def sound_header(rng: random.Random) -> tuple[Pairs, bytes]:
    """A header as any writer might make it, and its data."""
    pairs, at = Pairs(), 0
    for number in range(rng.randint(0, 5)):
        dtype = rng.choice(["BF16", "F32", "F32", "U8", "F8_E4M3", "I64", "BOOL", "F4"])
        shape = [rng.choice([0, 1, 2, 3, 4]) for _ in range(rng.randint(0, 3))]
        if dtype == "F4":
            shape.append(2)
        bits = BITS[dtype]
        for size in shape:
            bits *= size
        line = [("dtype", dtype), ("shape", shape), ("data_offsets", [at, at + bits // 8])]
        rng.shuffle(line)
        pairs.append((f"t{number}", Pairs(line)))
        at += bits // 8
    rng.shuffle(pairs)
    if rng.random() < 0.5:
        pairs.insert(0, ("__metadata__", Pairs([("format", "pt")])))
    return pairs, rng.randbytes(at)


def change_structure(pairs: Pairs, rng: random.Random) -> None:
    """One thing in the header becomes another; in place."""
    if not pairs or rng.random() < 0.1:
        line = Pairs([("dtype", "F32"), ("shape", rng.choice(ODD)), ("data_offsets", [0, 0])])
        pairs.append((rng.choice(NAMES), rng.choice([rng.choice(ODD), line])))
        return
    at = rng.randrange(len(pairs))
    name, value = pairs[at]
    kind = rng.randrange(8)
    if kind == 0:
        pairs[at] = (rng.choice(NAMES), value)
    elif kind == 1:
        pairs[at] = (name, rng.choice(ODD))
    elif kind == 2:
        pairs.insert(rng.randrange(len(pairs) + 1), (name, rng.choice(pairs)[1]))
    elif kind == 3:
        del pairs[at]
    elif isinstance(value, Pairs) and value:
        change_line(value, rng, kind)


def change_line(line: Pairs, rng: random.Random, kind: int) -> None:
    """The same below one tensor."""
    at = rng.randrange(len(line))
    key, value = line[at]
    if kind == 4 and isinstance(value, list) and not isinstance(value, Pairs) and value:
        inner = rng.randrange(len(value))
        near = value[inner] + rng.choice([-8, -4, -1, 1, 4, 8]) if type(value[inner]) is int else 0
        value = [*value[:inner], rng.choice([near, near, rng.choice(ODD)]), *value[inner + 1 :]]
        line[at] = (key, value)
    elif kind == 4 and isinstance(value, str):
        line[at] = (key, rng.choice([*BITS, "F33", "f32", "F32 "]))
    elif kind == 5:
        line[at] = (key, rng.choice(ODD))
    elif kind == 6:
        line.append((rng.choice([key, "strides", "data_offsets"]), rng.choice([value, *ODD])))
    elif rng.random() < 0.5:
        del line[at]
    else:
        line[at] = (rng.choice(["dtypes", "Shape", *NAMES]), value)


def change_bytes(content: bytes, rng: random.Random) -> bytes:
    """Some of the file's bytes become others, or there are more or fewer of them."""
    at = rng.randrange(len(content) + 1)
    to = min(len(content), at + rng.randint(1, 12))
    kind = rng.randrange(7)
    if kind == 0 and at < len(content):
        return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]
    if kind == 1:
        return content[:at]
    if kind == 2:
        return content[:at] + rng.randbytes(rng.randint(1, 9)) + content[at:]
    if kind == 3:
        return content[:at] + content[to:]
    if kind == 4:
        return content[:to] + content[at:]
    if kind == 5:
        token = rng.choice(
            [b'"', b"{", b"}", b"[", b"]", b",", b":", b"0", b"-", b"\\", b"\xff", b" ", b"\0"]
        )
        return content[:at] + token + content[to:]
    old = int.from_bytes(content[:8], "little")
    new = rng.choice(
        [0, 1, old - 1, old + 1, len(content), 2**31, 2**63, 2**64 - 1, rng.randrange(2**64)]
    )
    return struct.pack("<Q", new % 2**64) + content[8:]  # fmt: skip


def mutated_header(rng: random.Random) -> bytes:
    """A file with nothing, something, or more of it changed."""
    pairs, data = sound_header(rng)
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3]) if rng.random() < 0.7 else 0):
        change_structure(pairs, rng)
    text = dumps(pairs)
    text = rng.choice([text] * 8 + [text + "   ", " " + text, text + "\0", "\ufeff" + text])
    head = text.encode()
    content = struct.pack("<Q", len(head)) + head + data
    for _ in range(rng.choice([0, 1, 1, 2]) if rng.random() < 0.5 else 0):
        content = change_bytes(content, rng)
    return content


# What one input may do.

WATCHED: list[str] | None = None  # files that are opened, while a list is here


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and WATCHED is not None:
        WATCHED.append(os.fsdecode(arguments[0]))


sys.addaudithook(_audit)


@contextmanager
def within_limits(folder: Path) -> Iterator[list[str]]:
    """Little memory for all inputs together, no file but the folder's own; gives the list of opened files."""
    global WATCHED
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    before = resource.getrlimit(resource.RLIMIT_AS)
    handlers = {number: signal.signal(number, _too_long) for number, _ in TIMERS.values()}
    resource.setrlimit(resource.RLIMIT_AS, (size + BYTES, before[1]))
    home, WATCHED = os.path.realpath(folder), []
    try:
        yield WATCHED
        opened = {os.path.realpath(path) for path in WATCHED}
    finally:
        WATCHED = None
        for timer, (number, _) in TIMERS.items():
            signal.setitimer(timer, 0)
            signal.signal(number, handlers[number])
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert not [path for path in opened if os.path.dirname(path) != home]


def _too_long(number: int, *_: object) -> None:
    raise TimeoutError(f"too long: {signal.Signals(number).name}")


def ask(read: Callable[[], Any]) -> tuple[Any, str]:
    """What is read and no message, or None and the message of a refusal, which is one short line."""
    for timer, (_, seconds) in TIMERS.items():
        signal.setitimer(timer, seconds)
    try:
        return read(), ""
    except UserError as error:
        message = str(error)
        assert message.isprintable(), ascii(message)
        assert len(message) < 3_000
        return None, message


def by_the_package(content: bytes) -> Found | None:
    """What the safetensors package reads."""
    try:
        tensors = safetensors.deserialize(content)
    except safetensors.SafetensorError:
        return None
    return {name: (t["dtype"], tuple(t["shape"]), bytes(t["data"])) for name, t in tensors}


def by_us(file: Path, content: bytes) -> tuple[Found | None, str]:
    entries, message = ask(lambda: read_header(file))
    if entries is None:
        return None, message
    return {
        name: (e.dtype, e.shape, content[e.start : e.start + e.nbytes])
        for name, e in entries.items()
    }, ""


@pytest.mark.parametrize("seed", range(HEADERS // BATCH))
def test_headers(seed: int, tmp_path: Path) -> None:
    rng, file = random.Random(seed), tmp_path / SINGLE
    read = refused = 0
    with within_limits(tmp_path) as opened:
        for number in range(BATCH):
            content = mutated_header(rng)
            file.unlink(
                missing_ok=True
            )  # a new file is written at once, a shortened one waits for the disk
            file.write_bytes(content)
            ours, message = by_us(file, content)
            theirs = by_the_package(content)
            where = f"input {number} of seed {seed}: {content[:600]!r}"
            if ours is not None:
                assert ours == theirs, where
                read += 1
            elif theirs is not None:
                assert any(reason in message for reason in STRICTER), f"{message}; {where}"
            refused += ours is None
    assert len(opened) == 2 * BATCH  # written and read: the watch sees both
    # Not all of one kind: else the mutations or the comparison would be empty.
    assert min(read, refused) > BATCH / 10


def line(begin: int, end: int, shape: str) -> str:
    return f'{{"dtype":"F32","shape":{shape},"data_offsets":[{begin},{end}]}}'


BOMBS = {
    "200,000 keys, the last twice": "{"
    + ",".join(f'"{n}":0' for n in range(200_000))
    + ',"199999":0}',
    "200,000 tensors": "{" + ",".join(f'"{n}":{line(0, 0, "[0]")}' for n in range(50_000)) + ",}",
    "a product with millions of digits": f'{{"a":{line(0, 4, "[" + ",".join(["9" * 4000] * 2000) + "]")}}}',
    "20 digits in 20,000 dimensions": f'{{"a":{line(0, 4, "[" + ",".join(["9" * 18] * 20_000) + "]")}}}',
    "a shape of ones": f'{{"a":{line(0, 4, "[" + ",".join(["1"] * 1_000_000) + "]")}}}',
    "2^62 x 4 x 0": f'{{"a":{line(0, 0, f"[{2**62},4,0]")}}}',
    "a number of a million digits": f'{{"a":{line(0, 4, "[" + "9" * 1_000_000 + "]")}}}',
    "offsets at the end of all numbers": f'{{"a":{line(2**63 - 5, 2**63 - 1, "[1]")}}}',
    "a name of a million characters": f'{{"{"a" * 1_000_000}":{line(0, 4, "[1]")}}}',
    "a dtype of a million characters": f'{{"a":{{"dtype":"{"F" * 1_000_000}","shape":[1],"data_offsets":[0,4]}}}}',
    "brackets": "[" * 1_000_000,
    "objects": '{"a":' * 200_000,
    "a dtype of brackets": f'{{"a":{{"dtype":{"[" * 950}{"]" * 950},"shape":[1],"data_offsets":[0,4]}}}}',
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_headers_that_would_take_for_ever(bomb: str, tmp_path: Path) -> None:
    head = BOMBS[bomb].encode()
    (tmp_path / SINGLE).write_bytes(struct.pack("<Q", len(head)) + head + bytes(4))
    with within_limits(tmp_path):
        found, message = ask(lambda: read_header(tmp_path / SINGLE))
    assert found is None
    assert SINGLE in message


# The index.

SHARDS = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]


def write_shard(file: Path, names: list[str], rng: random.Random) -> None:
    pairs = Pairs()
    for number, name in enumerate(names):
        span = [4 * number, 4 * number + 4]
        pairs.append((name, Pairs([("dtype", "F32"), ("shape", [1]), ("data_offsets", span)])))
    head = dumps(pairs).encode()
    file.write_bytes(struct.pack("<Q", len(head)) + head + rng.randbytes(4 * len(names)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards with two tensors each, and what an index may not name: outside there are sound files too."""
    root = tmp_path_factory.mktemp("index")
    folder, outside, rng = root / "base", root / "outside", random.Random(0)
    for place in (folder, outside, folder / "sub"):
        place.mkdir()
        for number, shard in enumerate(SHARDS):
            write_shard(place / shard, [f"t{2 * number}", f"t{2 * number + 1}"], rng)
    (folder / "config.json").write_text("{}")
    write_shard(folder / "stray.safetensors", ["t0", "t1", "x"], rng)
    (folder / "link_out.safetensors").symlink_to(outside / SHARDS[0])
    (folder / "link_in.safetensors").symlink_to(SHARDS[0])
    (folder / "loop.safetensors").symlink_to("loop.safetensors")
    (folder / "nowhere.safetensors").symlink_to("nothing")
    os.mkfifo(folder / "pipe.safetensors")  # opening it would wait for ever
    return folder


def shard_names(folder: Path) -> list[Any]:
    outside = folder.parent / "outside" / SHARDS[0]
    return [
        *SHARDS * 4,
        *(f"../outside/{SHARDS[0]}", f"sub/{SHARDS[0]}", f"./{SHARDS[0]}", f"{SHARDS[0]}/"),
        *(str(outside), "link_out.safetensors", "link_in.safetensors", "loop.safetensors", "nowhere.safetensors"),
        *("pipe.safetensors", "sub", "stray.safetensors", "config.json", INDEX, "", ".", "..", "/", "/dev/zero"),
        *("a" * 300, "a" * 10_000, "\udc80", "a\0", f"{SHARDS[0]}\0", "a\nb", "..\\x", SHARDS[0].upper(), "~"),
        *(Raw('"\\ud800"'), *ODD),
    ]  # fmt: skip


def mutated_index(rng: random.Random, shards: list[Any]) -> bytes:
    weight_map = Pairs((f"t{n}", SHARDS[n // 2]) for n in range(6))
    top = Pairs([("metadata", Pairs([("total_size", 24)])), ("weight_map", weight_map)])
    for _ in range(rng.choice([0, 1, 1, 1, 2])):
        kind, at = rng.randrange(6), rng.randrange(len(weight_map) or 1)
        if kind == 0 and weight_map:
            weight_map[at] = (weight_map[at][0], rng.choice(shards))
        elif kind == 1:
            shard = rng.choice(shards)
            weight_map[:] = [(name, shard if s == SHARDS[0] else s) for name, s in weight_map]
        elif kind == 2:
            weight_map.append((rng.choice(["t6", "x", "t0", *NAMES]), rng.choice(shards)))
        elif kind == 3:
            del weight_map[at : at + rng.randint(1, 6)]
        elif kind == 4:
            top[rng.randrange(len(top))] = (
                rng.choice(["metadata", "weight_map"]),
                rng.choice([weight_map, *ODD]),
            )
        else:
            rng.shuffle(weight_map)
    content = dumps(top).encode()
    return change_bytes(content, rng) if rng.random() < 0.3 else content


def by_few_lines(folder: Path, index: bytes) -> dict[str, str] | None:
    """Tensor -> shard where the index and the shards agree, by the rules, else None."""
    twice: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice.extend(key for key, _ in pairs[len(dict(pairs)) :])
        return dict(pairs)

    try:
        weight_map = json.loads(index.decode("utf-8-sig"), object_pairs_hook=unique)["weight_map"]
        held = {
            (tensor, shard)
            for shard in set(weight_map.values())
            for tensor in by_the_package((folder / shard).read_bytes() if shard in ALLOWED else b"")
        }
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return None
    agrees = not twice and bool(weight_map) and held == set(weight_map.items())
    return weight_map if agrees else None


ALLOWED = {*SHARDS, "link_in.safetensors", "stray.safetensors"}


def test_index_files(folder: Path) -> None:
    rng, shards = random.Random(1), shard_names(folder)
    read = 0
    for number in range(INDICES):
        index = mutated_index(rng, shards)
        (folder / INDEX).unlink(missing_ok=True)
        (folder / INDEX).write_bytes(index)
        expected = by_few_lines(folder, index)
        with within_limits(folder):
            found, message = ask(lambda: Checkpoint.open(folder))
        where = f"input {number}: {message}; {index[:800]!r}"
        assert (found is None) == (expected is None), where
        if expected is None:
            continue
        read += 1
        assert list(found.entries) == list(expected), where
        for name, shard in expected.items():
            entry, content = found.entries[name], (folder / shard).read_bytes()
            assert entry.file == folder / shard
            data = content[entry.start : entry.start + entry.nbytes]
            assert (entry.dtype, entry.shape, data) == by_the_package(content)[name], where
    assert read > INDICES / 20


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_config_and_index_are_files_of_the_folder_and_small(
    name: str, folder: Path, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    for shard in SHARDS:
        (base / shard).write_bytes((folder / shard).read_bytes())
    (base / "config.json").write_text("{}")
    weight_map = {f"t{n}": SHARDS[n // 2] for n in range(6)}
    (base / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert list(Checkpoint.open(base).entries) == list(weight_map)
    (base / name).rename(tmp_path / "elsewhere.json")
    (base / name).symlink_to(tmp_path / "elsewhere.json")
    with within_limits(base):
        found, message = ask(lambda: Checkpoint.open(base))
    assert found is None
    assert name in message
    assert "a link out of the folder" in message
    (base / name).unlink()
    with (base / name).open("wb") as file:
        file.truncate(1 << 40)  # takes no room on the disk
    with within_limits(base):
        found, message = ask(lambda: Checkpoint.open(base))
    assert found is None
    assert f"{1 << 40} bytes; expected at most" in message
