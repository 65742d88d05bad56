"""Broken and hostile checkpoint folders: each gets one line that says where and what, before data is read."""

import json
import os
import re
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from hymoe.engine import hf_index
from hymoe.engine.hf_checkpoint import (
    Checkpoint,
    load_pretrained,
    plan_export,
    read_config,
    save_pretrained,
)
from tests.hf_folder import INDEX, refused, rewrite
from tests.tiny import tiny_lm

SINGLE = "model.safetensors"
EXPERT = "backbone.layers.1.mixer.experts.3.up_proj.weight"


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A whole checkpoint in one file."""
    folder = tmp_path_factory.mktemp("good") / "base"
    save_pretrained(tiny_lm(), folder)
    return folder


@pytest.fixture(scope="module")
def good_shards(tmp_path_factory):
    """A whole checkpoint in several."""
    folder = tmp_path_factory.mktemp("shards") / "base"
    save_pretrained(tiny_lm(), folder, max_shard_size="60KB")
    return folder


@pytest.fixture
def single(good, tmp_path):
    """A copy to break."""
    return Path(shutil.copytree(good, tmp_path / "base"))


@pytest.fixture
def shards(good_shards, tmp_path):
    """A copy to break."""
    return Path(shutil.copytree(good_shards, tmp_path / "base_shards"))


@pytest.fixture
def no_data(monkeypatch):
    """From here on, reading a tensor's bytes is a failure of the test."""

    def refuse(*_):
        pytest.fail("data was read before everything was checked")

    monkeypatch.setattr(hf_index, "_pread", refuse)


def load_is_refused(folder, *words):
    return refused(lambda: load_pretrained(folder), *words)


def edit_index(folder, change):
    content = json.loads((folder / INDEX).read_text())
    change(content["weight_map"])
    (folder / INDEX).write_text(json.dumps(content))


def write_raw(file, header, data=b"", length=None):
    """A safetensors file by hand: header as JSON or bytes, data, the length that it claims."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def line(begin, end, dtype="F32", shape=(4,)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


# The folder and its config.


def test_a_whole_checkpoint_passes(single, shards):
    assert load_pretrained(single).source == single
    assert load_pretrained(shards).source == shards


def test_no_folder(tmp_path, single):
    load_is_refused(tmp_path / "nowhere", "nowhere", "no such folder")
    load_is_refused(single / SINGLE, SINGLE, "no such folder")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, ["no config.json"]),
        ("{not json", ["config.json", "not valid JSON", "line 1"]),
        ("", ["config.json", "not valid JSON"]),
        ("[1, 2]", ["config.json", "expected a JSON object"]),
        ("\ufeff" + "nonsense", ["config.json", "not valid JSON"]),
        (b"\xff\xfe\x00{}", ["config.json", "not valid JSON"]),
        ("[" * 100_000, ["config.json", "not valid JSON"]),
    ],
    ids=["missing", "broken", "empty", "list", "bom", "utf-16", "deep"],
)
def test_config_that_is_no_config(text, words, single, no_data):
    (single / "config.json").unlink()
    if text is not None:
        data = text if isinstance(text, bytes) else text.encode()
        (single / "config.json").write_bytes(data)
    load_is_refused(single, "base", *words)


def test_config_of_another_model(single, no_data):
    config = json.loads((single / "config.json").read_text())
    (single / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    load_is_refused(single, "config.json", "model_type", "llama", "nemotron_h")
    refused(lambda: read_config(single / "nowhere"), "nowhere", "config.json")


@pytest.mark.parametrize("other", [[], ["pytorch_model.bin"], ["adapter.safetensors"]])
def test_no_weights(other, single, no_data):
    (single / SINGLE).unlink()
    for name in other:
        (single / name).write_text("x")
    load_is_refused(single, "base", SINGLE, INDEX, *other)


# The index: all of it is checked before any shard is opened.


@pytest.mark.parametrize(
    "entry",
    [
        "../x.safetensors",
        "{outside}/x.safetensors",
        "sub/../../x.safetensors",
        "sub/x.safetensors",
        "..",
        ".",
        "",
        "..\\x.safetensors",
        "x\0.safetensors",
    ],
)
def test_index_that_names_something_else_than_a_file_of_the_folder(
    entry, shards, tmp_path, monkeypatch
):
    """huggingface/transformers#47176; the files exist and are sound, so nothing but the rule stops them."""
    entry = entry.replace("{outside}", str(tmp_path))
    (shards / "sub").mkdir()
    for place in (tmp_path, shards / "sub"):
        save_file({EXPERT: torch.zeros(24, 32)}, place / "x.safetensors")
    edit_index(shards, lambda weight_map: weight_map.update({EXPERT: entry}))
    monkeypatch.setattr(hf_index, "read_header", lambda file: pytest.fail(f"{file} was opened"))
    load_is_refused(shards, INDEX, EXPERT, repr(entry), "plain file name")


def test_link_out_of_the_folder(shards, single, tmp_path, monkeypatch):
    monkeypatch.setattr(hf_index, "read_header", lambda file: pytest.fail(f"{file} was opened"))
    for folder, name in ((shards, "model-00002-of-"), (single, SINGLE)):
        file = next(path for path in folder.iterdir() if path.name.startswith(name))
        outside = tmp_path / f"outside-{file.name}"
        file.rename(outside)
        file.symlink_to(outside)
        load_is_refused(folder, file.name, "a link out of the folder", str(outside))


def test_links_within_the_folder_and_to_it_are_followed(shards, tmp_path):
    file = next(shards.glob("model-00002-*"))
    file.rename(shards / "elsewhere.bin")
    file.symlink_to("elsewhere.bin")
    (tmp_path / "alias").symlink_to(shards)
    assert load_pretrained(tmp_path / "alias")


def test_download_cache_links_to_its_blobs_only(shards, tmp_path):
    """models--owner--name/snapshots/REVISION/FILE -> ../../blobs/HASH: the one rule for links."""
    repo = tmp_path / "hub" / "models--owner--name"
    snapshot, blobs = repo / "snapshots" / "abc", repo / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(shards.iterdir())):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    lm = load_pretrained(snapshot)
    plan = plan_export(lm, tmp_path / "out")
    assert plan.carried == ["config.json"]

    file = next(snapshot.glob("model-00002-*"))
    blob = Path(os.path.realpath(file))
    for outside in (repo / "x", tmp_path / "x", blobs / "deeper" / "x"):
        outside.parent.mkdir(exist_ok=True)
        shutil.copy(blob, outside)
        file.unlink()
        file.symlink_to(outside)
        load_is_refused(snapshot, file.name, "a link out of the folder")

    other = tmp_path / "other" / "snapshots" / "abc"  # looks alike, but is no download cache
    shutil.copytree(snapshot, other, symlinks=True)
    shutil.copytree(blobs, tmp_path / "other" / "blobs")
    wrong = other / file.name
    wrong.unlink()
    wrong.symlink_to(f"../../blobs/{blob.name}")
    load_is_refused(other, "a link out of the folder")


def test_missing_shard(shards, no_data):
    file = next(shards.glob("model-00002-*"))
    file.unlink()
    message = load_is_refused(shards, INDEX, file.name, "missing")
    assert re.search(r"tensor backbone\.\S+: ", message)
    file.symlink_to("nothing.safetensors")
    load_is_refused(shards, file.name, "missing")
    file.unlink()
    file.mkdir()
    load_is_refused(shards, file.name, "not a regular file")
    file.rmdir()
    os.mkfifo(file)  # opening it would wait for ever
    load_is_refused(shards, file.name, "not a regular file")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", ["not valid JSON"]),
        ("[]", ["no weight_map"]),
        ('{"metadata": {}}', ["no weight_map"]),
        ('{"weight_map": {}}', ["no weight_map"]),
        ('{"weight_map": ["a"]}', ["no weight_map"]),
        ('{"weight_map": {"a": 3}}', ["tensor a", "3", "file name"]),
        ('{"weight_map": {"a": null}}', ["tensor a", "None", "file name"]),
        ('{"weight_map": {"a": "x", "a": "y"}}', ["a occurs twice"]),
    ],
)
def test_index_that_is_no_index(content, words, shards, no_data):
    (shards / INDEX).write_text(content)
    load_is_refused(shards, INDEX, *words)


def test_index_and_shards_disagree(shards, no_data):
    second = next(shards.glob("model-00002-*"))
    inside = next(iter(load_file(second)))

    edit_index(shards, lambda weight_map: weight_map.update({"ghost": second.name}))
    load_is_refused(shards, INDEX, "tensor ghost", second.name, "no shard has it")
    edit_index(shards, lambda weight_map: weight_map.pop("ghost"))

    first = next(shards.glob("model-00001-*")).name
    edit_index(shards, lambda weight_map: weight_map.update({inside: first}))
    load_is_refused(shards, INDEX, inside, first, f"it is in {second.name}")

    edit_index(shards, lambda weight_map: weight_map.pop(inside))
    load_is_refused(shards, INDEX, inside, second.name, "not in the index")


def test_tensor_in_two_shards(shards, no_data):
    first, second = sorted(shards.glob("*.safetensors"))[:2]
    name, tensor = next(iter(load_file(second).items()))
    save_file({**load_file(first), name: tensor}, first)
    load_is_refused(shards, name, "twice", first.name, second.name)


def test_single_file_and_index_together(shards, single, no_data):
    shutil.copy(single / SINGLE, shards / SINGLE)
    load_is_refused(shards, SINGLE, INDEX, "both")


# The shards.

FOUR = {"a": line(0, 16)}


@pytest.mark.parametrize(
    ("write", "words"),
    [  # osaurus-ai/vmlx-swift#217 (1) to (4), then further of the kind
        (lambda f: write_raw(f, FOUR, bytes(10)), ["truncated", "{size}", "{whole}"]),
        (lambda f: write_raw(f, FOUR, bytes(18)), ["trailing bytes", "{size}", "{whole}"]),
        (lambda f: f.write_bytes(b"abc"), ["3 bytes", "8 bytes"]),
        (lambda f: write_raw(f, FOUR, bytes(16), 2**62), [str(2**62), "{size}"]),
        (lambda f: write_raw(f, FOUR, b"", 10**8 + 1), [str(10**8 + 1), "{size}"]),
        (lambda f: f.write_bytes(b""), ["0 bytes", "8 bytes"]),
        (lambda f: write_raw(f, FOUR), ["truncated", "{size}", "{whole}"]),
    ],
    ids=["short", "long", "3-bytes", "length-2^62", "length-1e8", "empty", "header-only"],
)
def test_shard_of_another_size_than_its_header_says(write, words, single, no_data):
    file = single / SINGLE
    write(file)
    size = file.stat().st_size
    whole = 8 + len(json.dumps(FOUR)) + 16
    expected = [word.format(size=size, whole=whole) for word in words]
    load_is_refused(single, SINGLE, *expected)
    with pytest.raises(SafetensorError):  # the format's own reader agrees
        safe_open(file, "pt")


@pytest.mark.parametrize("cut", [-1, 1], ids=["one-byte-less", "one-byte-more"])
def test_every_shard_is_measured_at_the_start(cut, shards, no_data):
    """Also the last one, which nothing has asked for yet."""
    last = sorted(shards.glob("*.safetensors"))[-1]
    size = last.stat().st_size
    with open(last, "ab") as file:
        file.truncate(size + cut)
    load_is_refused(shards, last.name, str(size), str(size + cut))


def test_an_absurd_header_is_not_allocated(single):
    """8 GB would fit into this (sparse) file of 16; no header is that long."""
    with open(single / SINGLE, "wb") as file:
        file.write(struct.pack("<Q", 2**33))
        file.truncate(2**34)
    load_is_refused(single, SINGLE, str(2**33), "100000000")


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        (b"{nonsense", 0, ["not valid JSON"]),
        (b"\xff\xfe", 0, ["not valid JSON"]),
        ([1], 0, ["no JSON object"]),
        ({"a": 3}, 0, ["tensor a", "dtype, shape and data_offsets"]),
        ({"a": {"dtype": "F32", "shape": [4]}}, 16, ["tensor a", "data_offsets"]),
        ({"a": line(0, 16, shape=(-4,))}, 16, ["tensor a", "shape"]),
        ({"a": line(0, 16, shape=(4.0,))}, 16, ["tensor a", "shape"]),
        ({"a": line(0, 16, shape=(True,))}, 16, ["tensor a", "shape"]),
        ({"a": line(-16, 0)}, 16, ["tensor a", "data_offsets"]),
        ({"a": line(16, 0)}, 16, ["tensor a", "-16 bytes", "16"]),
        ({"a": line(0, 16, "F33")}, 16, ["tensor a", "F33"]),
        ({"a": line(0, 16, None)}, 16, ["tensor a", "dtype None"]),
        ({"a": line(0, 16, ["F32"])}, 16, ["tensor a", "dtype"]),
        ({"a": line(0, 16, "BF16")}, 16, ["tensor a", "16 bytes", "expected 8"]),
        ({"a": line(0, 20)}, 20, ["tensor a", "20 bytes", "expected 16"]),
        ({"a": line(0, 16, shape=(2**62, 4))}, 16, ["tensor a", "16 bytes"]),
        ({"a": line(0, 16), "b": line(8, 24)}, 24, ["tensor b", "overlap"]),
        ({"a": line(0, 16), "b": line(20, 36)}, 36, ["tensor b", "hole"]),
        ({"a": line(4, 20)}, 20, ["tensor a", "hole"]),
        (b'{"a": 1, "a": 2}', 0, ["a occurs twice"]),
    ],
)
def test_broken_headers(header, data, words, single, no_data):
    write_raw(single / SINGLE, header, bytes(data))
    load_is_refused(single, SINGLE, *words)


def test_headers_of_odd_but_sound_files_are_read(tmp_path):
    """Metadata, padding, tensors without elements, any order, dtypes that we do not train."""
    file = tmp_path / SINGLE
    header = {
        "b": line(16, 19, "F8_E4M3", (3,)),
        "__metadata__": {"format": "pt"},
        "none": line(16, 16, "F32", (0, 7)),
        "a": line(0, 16),
        "scalar": line(19, 20, "BOOL", ()),
    }
    write_raw(file, json.dumps(header).encode() + b"   ", bytes(20))
    entries = hf_index.read_header(file)
    assert {n: (e.start, e.nbytes) for n, e in entries.items()} == {
        name: (file.stat().st_size - 20 + begin, size)
        for name, (begin, size) in {
            "a": (0, 16),
            "none": (16, 0),
            "b": (16, 3),
            "scalar": (19, 1),
        }.items()
    }


def test_shard_that_goes_away_after_it_was_checked(single):
    checkpoint = Checkpoint.open(single)
    (single / SINGLE).unlink()
    refused(lambda: checkpoint.read(EXPERT), SINGLE, "cannot be opened")


def test_shard_that_shrinks_while_it_is_read(single):
    checkpoint = Checkpoint.open(single)
    with open(single / SINGLE, "ab") as file:
        file.truncate(checkpoint.entries[EXPERT].start + 10)
    refused(lambda: checkpoint.read(EXPERT), SINGLE, EXPERT, "ends at byte")


# Against the config.


def without(*names):
    return lambda tensors: {n: t for n, t in tensors.items() if n not in names}


def replaced(name, make):
    return lambda tensors: {**tensors, name: make(tensors.get(name))}


NORM = "backbone.norm_f.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without(EXPERT), [EXPERT, "missing"]),
        (without(EXPERT, NORM), [EXPERT, NORM, "missing"]),
        (without("lm_head.weight"), ["lm_head.weight", "missing"]),
        (replaced("backbone.x", lambda _: torch.ones(2)), ["backbone.x", "unexpected"]),
        (replaced("mtpx.weight", lambda _: torch.ones(2)), ["mtpx.weight", "unexpected"]),
        (replaced(EXPERT, lambda t: t.t().contiguous()), [EXPERT, "[32, 24]", "[24, 32]"]),
        (replaced(NORM, lambda _: torch.ones(())), [NORM, "[]", "[32]"]),
        (replaced(NORM, lambda t: t.to(torch.int8)), [NORM, "I8", "quantised"]),
        (replaced(EXPERT, lambda t: t.to(torch.float8_e4m3fn)), [EXPERT, "F8_E4M3", "quantised"]),
        (replaced(EXPERT, lambda t: t[:, :16].to(torch.uint8)), [EXPERT, "U8", "quantised"]),
        (replaced(EXPERT + "_scale", lambda _: torch.ones(1)), [EXPERT + "_scale", "quantised"]),
        (replaced("model.norm_f.weight", lambda _: torch.ones(32)), [NORM[:8], "model.norm_f"]),
        (lambda _: {"x": torch.ones(1)}, ["x", "backbone.", "model."]),
        (
            lambda tensors: {n.replace("backbone.", "net."): t for n, t in tensors.items()},
            ["net.", "and 38 more", "backbone."],
        ),
    ],
)
def test_tensors_that_differ_from_the_config(change, words, single, no_data):
    rewrite(single, change)
    load_is_refused(single, "base", *words)


def test_many_missing_tensors_are_counted(single, no_data):
    rewrite(single, lambda tensors: {n: t for n, t in tensors.items() if ".experts." not in n})
    message = load_is_refused(single, "experts.0.up_proj", "and 13 more", "missing")
    assert len(message) < 400


def test_tied_embeddings_with_another_head(single):
    config = json.loads((single / "config.json").read_text())
    (single / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    load_is_refused(single, "lm_head.weight", "embeddings.weight", "tie_word_embeddings")
    rewrite(single, lambda t: {**t, "lm_head.weight": t["lm_head.weight"].bfloat16()})
    load_is_refused(single, "lm_head.weight", "embeddings.weight", "tie_word_embeddings")


def test_quantised_mtp_tensors_are_not_ours(single):
    """They are passed through, whatever they are; only what is trained must be trainable."""
    scale = {"mtp.layers.0.eh_proj.weight_scale": torch.ones(1)}
    rewrite(single, lambda t: {**t, **scale})
    assert load_pretrained(single)
