"""Is a bundle one thing? Everything that names something is compared with what it names.

1. **Weights**: index and shards agree, nothing is missing, names and shapes are those of config.json.
2. **Files**: exactly those of the evidence, the notes and nothing else; each file's sha256 is the evidence's.
3. **Stop ids**: the same in config.json, generation_config.json, serving_config.json and the evidence, `<|im_end|>`
   among them, all in the vocabulary; the tokenizer's end token is one.
4. **Settings**: generation_config.json and serving_config.json agree; the system prompt has text.
5. **Template**: the same in its two places; renders some conversations, the served system prompt in front, to the
   same text and token ids in `transformers` as in our renderer.
6. **Loads** in `transformers`, in a process of its own. Where host memory does not hold the weights, on the meta
   device: names and shapes of all tensors, but no values; the report says which.
7. **Snippet** of README.md runs, as it stands, in a process of its own. Where host or GPU memory does not hold the
   weights, on small random ones with the bundle's ids, tokenizer, template and settings; the report says so.

Notes (README.md and so on) are not hashed: people fill their gaps. The card's code is run: check only what you trust.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from hymoe.engine.bundle.card import snippet_of
from hymoe.engine.data import chat
from hymoe.engine.data.chat import CHAT_TEMPLATE
from hymoe.engine.data.schema import Conversation, LeftOut, Message
from hymoe.engine.data.template import ChatTemplate, load_template
from hymoe.engine.data.tokenizer import Tokenizer
from hymoe.engine.errors import UserError
from hymoe.engine.eval.figures import read_figures
from hymoe.engine.hf_checkpoint import Checkpoint, read_config, save_pretrained
from hymoe.engine.hf_index import INDEX
from hymoe.engine.provenance import described
from hymoe.engine.saver import available_bytes
from hymoe.model.config import HybridConfig
from hymoe.model.net import HybridLM

TRAINING_EVIDENCE = "training_evidence.json"
EVALUATIONS = "evaluation"
REQUIRED = (
    *("config.json", "generation_config.json", "serving_config.json", "tokenizer.json"),
    *("tokenizer_config.json", "chat_template.jinja", "system_prompt.txt", "README.md"),
)
HOST_MARGIN = 1.3  # of the bytes of the weights, for what loading takes beside them
PROCESS_SECONDS = 7200
# Ids of the bundle's own config.json that a small stand-in for it must share.
SHARED_KEYS = ("model_type", "architectures", "vocab_size", "tie_word_embeddings")
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "layers_block_type": ["mamba", "attention", "mlp"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 32,
    "mamba_num_heads": 2,
    "mamba_head_dim": 16,
    "n_groups": 1,
    "ssm_state_size": 16,
    "chunk_size": 16,
    "dtype": "float32",
}

Load = Literal["auto", "whole", "meta"]
Say = Callable[[str], None]


def check_bundle(folder: Path, *, load: Load = "auto", say: Say = lambda line: None) -> list[str]:
    """Checks a bundle.

    Args:
        folder: the bundle.
        load: whether its values are loaded in `transformers`; auto: where host memory allows it.
        say: takes lines for a person, before what takes long.

    Returns:
        What was found to be right, one line each.

    Raises:
        UserError: what is wrong and where.
    """
    for name in (*REQUIRED, TRAINING_EVIDENCE):
        if not (folder / name).is_file():
            raise UserError(f"{folder / name}: missing; expected it in a bundle")
    evidence = _object(folder / TRAINING_EVIDENCE)
    checkpoint = Checkpoint.open(folder)
    checkpoint.check_against(read_config(folder))
    _check_index(checkpoint)
    shards = {entry.file.name for entry in checkpoint.entries.values()}
    size = sum(entry.nbytes for entry in checkpoint.entries.values())
    report = [f"{len(checkpoint.entries)} tensors in {len(shards)} weight files, index complete"]
    say(f"check   comparing {size / 1e9:.1f} GB with the evidence")
    report.append(_check_files(folder, evidence, shards))
    tokenizer = Tokenizer(folder)
    ends = _check_stop_ids(folder, evidence, tokenizer)
    report.append(f"stop ids {ends} agree in config, generation, serving and evidence")
    _check_settings(folder)
    conversations = _conversations(folder)
    ours = _render(folder, tokenizer, conversations)
    is_whole = load == "whole" or (load == "auto" and size * HOST_MARGIN <= available_bytes())
    say(f"check   loading in transformers ({'whole' if is_whole else 'meta device'})")
    theirs = _in_transformers(folder, conversations, on_meta=not is_whole)
    report += _compare(folder, conversations, ours, theirs, ends, is_whole)
    say("check   running the snippet of README.md")
    report.append(_run_snippet(folder, is_whole and _fits_device(size)))
    return report


def _fits_device(size: int) -> bool:
    """Whether the device that the snippet chooses has room for the weights."""
    if not torch.cuda.is_available():
        return True
    free, _ = torch.cuda.mem_get_info()
    return size * HOST_MARGIN <= free


def end_token(settings: dict[str, Any]) -> str | None:
    """The end token that a tokenizer_config.json names."""
    token = settings.get("eos_token")
    return token.get("content") if isinstance(token, dict) else token


def _check_index(checkpoint: Checkpoint) -> None:
    path = checkpoint.folder / INDEX
    if path.is_file():
        said = (_object(path).get("metadata") or {}).get("total_size")
        size = sum(entry.nbytes for entry in checkpoint.entries.values())
        if said != size:
            raise UserError(f"{path}: total_size is {said}; the tensors have {size} bytes")


def _check_files(folder: Path, evidence: dict[str, Any], shards: set[str]) -> str:
    """The folder has what the evidence lists, unchanged, and nothing else."""
    path = folder / TRAINING_EVIDENCE
    for key, kind in (("weights", dict), ("files", dict), ("notes", list), ("evaluations", list)):
        if not isinstance(evidence.get(key), kind):
            raise UserError(f"{path}: {key} is missing; expected the evidence of a bundle")
    weights, others = evidence["weights"], evidence["files"]
    if weights.keys() != shards:
        name = min(weights.keys() ^ shards)
        raise UserError(f"{path}: weight file {name} is not both here and in the weights' index")
    _check_evaluations(folder, evidence)
    listed = {*weights, *others, *evidence["notes"], TRAINING_EVIDENCE}
    there = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if not p.is_dir()}
    for name in sorted(listed ^ there):
        fault = "missing" if name in listed else "a stray file: the evidence does not list it"
        raise UserError(f"{folder / name}: {fault}")
    stated = weights | others
    for name in sorted(stated):
        if (folder / name).is_symlink():
            raise UserError(f"{folder / name}: is a link; expected a file")
    for name, found in described(folder, stated).items():
        if found != stated[name]:
            raise UserError(
                f"{folder / name}: is not the file of the evidence: {found['bytes']} bytes, sha256 "
                f"{found['sha256']}; {path.name} says {stated[name]}"
            )
    return f"{len(stated)} files have the hashes of the evidence, no stray file"


def _check_evaluations(folder: Path, evidence: dict[str, Any]) -> None:
    """The figures are those of the files beside them."""
    path = folder / TRAINING_EVIDENCE
    for measured in evidence["evaluations"]:
        name = str(measured.get("file"))
        if not (folder / name).is_file():
            raise UserError(f"{folder / name}: missing; {path} has figures of this evaluation")
        if measured.get("sha256") != (evidence["files"].get(name) or {}).get("sha256"):
            raise UserError(f"{path}: two hashes of {name}")
        if (measured.get("kind"), measured.get("figures")) != read_figures(folder / name):
            raise UserError(f"{path}: its figures of {name} are not those of the file")


def _check_stop_ids(folder: Path, evidence: dict[str, Any], tokenizer: Tokenizer) -> list[int]:
    keys = {
        "config.json": "eos_token_id",
        "generation_config.json": "eos_token_id",
        "serving_config.json": "stop_token_ids",
    }
    said = {name: _ids(folder / name, key) for name, key in keys.items()}
    said[TRAINING_EVIDENCE] = set(evidence.get("stop_token_ids") or ())
    expected = said["generation_config.json"]
    for name, ids in said.items():
        if ids != expected:
            raise UserError(
                f"{folder / name}: stop ids {sorted(ids)}, generation_config.json has {sorted(expected)}; "
                "expected the same ids everywhere"
            )
    if tokenizer.im_end not in expected:
        raise UserError(
            f"{folder / 'generation_config.json'}: stop ids {sorted(expected)} lack <|im_end|>, id {tokenizer.im_end}"
        )
    size = read_config(folder).vocab_size
    outside = [i for i in expected if not 0 <= i < size]
    if outside:
        raise UserError(
            f"{folder / 'generation_config.json'}: stop id {outside[0]}; expected an id of the vocabulary, "
            f"0 to {size - 1}"
        )
    token = end_token(_object(folder / "tokenizer_config.json"))
    if tokenizer.id_of(token or "") not in expected:
        raise UserError(
            f"{folder / 'tokenizer_config.json'}: eos_token is {token!r}, id {tokenizer.id_of(token or '')}; "
            f"expected one of the stop ids {sorted(expected)}"
        )
    return sorted(expected)


def _ids(path: Path, key: str) -> set[int]:
    value = _object(path).get(key)
    values = value if isinstance(value, list) else [value]
    if not values or any(type(i) is not int for i in values):
        raise UserError(f"{path}: {key} = {value!r}; expected an id or a list of ids")
    return set(values)


def _check_settings(folder: Path) -> None:
    prompt = folder / "system_prompt.txt"
    if not prompt.read_bytes().decode("utf-8", errors="replace").strip():
        raise UserError(f"{prompt}: is empty; expected the system prompt")
    serving_file = folder / "serving_config.json"
    serving, settings = _object(serving_file), _object(folder / "generation_config.json")
    generation = {"temperature": 0.0, "top_p": 1.0, **settings}
    if not settings.get("do_sample"):
        generation |= {"temperature": 0.0, "top_p": serving.get("top_p")}
    for key in ("temperature", "top_p", "repetition_penalty", "max_new_tokens"):
        if serving.get(key) != generation.get(key):
            raise UserError(
                f"{serving_file}: {key} = {serving.get(key)}, generation_config.json has {generation.get(key)}"
            )
    for key in ("system_prompt_file", "chat_template_file"):
        if not (folder / str(serving.get(key))).is_file():
            raise UserError(f"{serving_file}: {key} = {serving.get(key)!r}; no such file")
    template = (folder / "chat_template.jinja").read_bytes().decode("utf-8")
    if _object(folder / "tokenizer_config.json").get("chat_template") != template:
        raise UserError(
            f"{folder / 'tokenizer_config.json'}: chat_template differs from chat_template.jinja"
        )


def _conversations(folder: Path) -> list[tuple[list[dict[str, str]], bool]]:
    """Messages and whether an answer's header follows: the cases in which templates are known to go apart."""
    prompt = (folder / "system_prompt.txt").read_bytes().decode("utf-8")
    system = {"role": "system", "content": prompt}
    turns = [
        ("user", "Name a river."),
        ("assistant", "The Elbe."),
        (
            "user",
            "Caf\u00e9 \u0416\u4e2d\u6587 \U0001f600: a < b && {{ x }} {% y %} \"q\" 'r' \\n?",
        ),
        ("assistant", "Two\n\nparagraphs, then a list:\n- one\n- two"),
        ("user", "Thanks"),
    ]
    messages = [{"role": role, "content": content} for role, content in turns]
    return [
        ([system, messages[0]], True),
        ([system, *messages], True),
        ([system, *messages[:4]], False),
        ([messages[2]], True),
        ([messages[0], messages[1], messages[2]], True),
    ]


def _render(
    folder: Path, tokenizer: Tokenizer, conversations: list[tuple[list[dict[str, str]], bool]]
) -> list[dict[str, Any]]:
    """Text and ids as training and our own generation have them."""
    template = load_template("base", folder, tokenizer)
    assert isinstance(template, ChatTemplate)
    is_ours = (folder / "chat_template.jinja").read_text(encoding="utf-8") == CHAT_TEMPLATE
    found = []
    for messages, answer in conversations:
        turns = tuple(Message(m["role"], m["content"]) for m in messages)
        conversation = Conversation(turns)
        try:
            text = template.text(conversation, answer=answer)
            if is_ours:
                render = chat.render_prompt if answer else _whole
                ids = render(turns, tokenizer)
            elif answer:
                ids = template.render_prompt(conversation)
            else:
                ids = template.render(conversation).ids
        except LeftOut as reason:
            roles = ", ".join(m["role"] for m in messages)
            raise UserError(
                f"{folder / 'chat_template.jinja'}: does not render a conversation of {roles} ({reason})"
            ) from None
        found.append({"text": text, "ids": ids})
    return found


def _whole(turns: tuple[Message, ...], tokenizer: Tokenizer) -> list[int]:
    return chat.render(turns, tokenizer).ids


def _in_transformers(folder: Path, conversations: list[Any], *, on_meta: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="hymoe_bundle_") as scratch:
        asked, answer = Path(scratch) / "asked.json", Path(scratch) / "answer.json"
        content = {
            "folder": str(folder.resolve()),
            "conversations": conversations,
            "on_meta": on_meta,
        }
        asked.write_text(json.dumps(content), encoding="utf-8")
        command = [sys.executable, "-m", "hymoe.engine.bundle.verify", str(asked), str(answer)]
        _run(command, Path(scratch), f"{folder}: does not load in transformers")
        return json.loads(answer.read_text(encoding="utf-8"))


def _run(command: list[str], cwd: Path, fault: str) -> str:
    """A process to its end; what it printed."""
    try:
        done = subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, timeout=PROCESS_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"{fault}: not done after {PROCESS_SECONDS} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        raise UserError(f"{fault} (exit {done.returncode}): {lines[-1].strip()}")
    return done.stdout


def _compare(
    folder: Path,
    conversations: list[tuple[list[dict[str, str]], bool]],
    ours: list[dict[str, Any]],
    theirs: dict[str, Any],
    ends: list[int],
    is_whole: bool,
) -> list[str]:
    """What `transformers` found against what we have."""
    template = folder / "chat_template.jinja"
    for (messages, _), our, their in zip(conversations, ours, theirs["renders"], strict=True):
        for key in ("text", "ids"):
            if our[key] != their[key]:
                place = _first_difference(our[key], their[key])
                roles = ", ".join(m["role"] for m in messages)
                raise UserError(
                    f"{template}: {key} of a conversation of {roles} differ from place {place}: ours "
                    f"{our[key][place : place + 12]!r}, transformers {their[key][place : place + 12]!r}"
                )
    for key in ("missing", "unexpected", "mismatched"):
        if theirs[key]:
            raise UserError(f"{folder}: transformers finds {theirs[key][0]} {key}")
    eos = theirs["generation_eos_token_id"]
    if sorted(eos if isinstance(eos, list) else [eos]) != ends:
        raise UserError(f"{folder}: transformers generates until {eos}; expected {ends}")
    if theirs["tokenizer_eos_token_id"] not in ends:
        raise UserError(
            f"{folder / 'tokenizer_config.json'}: in transformers the end token is "
            f"{theirs['tokenizer_eos_token_id']}; expected one of {ends}"
        )
    if is_whole and not theirs["finite"]:
        raise UserError(f"{folder}: a forward pass in transformers gave logits that are not finite")
    how = (
        "whole, a forward pass is finite"
        if is_whole
        else "on the meta device: names and shapes, no values (host memory does not hold the weights)"
    )
    return [
        f"{len(ours)} conversations render to the same text and ids in transformers",
        f"loads in transformers {how}; {theirs['parameters']:,} parameters",
    ]


def _first_difference(a: Any, b: Any) -> int:
    same = (x == y for x, y in zip(a, b, strict=False))
    return next((i for i, is_same in enumerate(same) if not is_same), min(len(a), len(b)))


def _run_snippet(folder: Path, is_whole: bool) -> str:
    card = folder / "README.md"
    code = snippet_of(card.read_text(encoding="utf-8"))
    if code is None:
        raise UserError(f"{card}: has no Python block; expected the snippet that loads the model")
    with tempfile.TemporaryDirectory(prefix="hymoe_snippet_") as scratch:
        place = folder.resolve()
        if not is_whole:
            place = Path(scratch) / "small"
            _small_stand_in(folder, place)
        # -B, and no file of its own: the folder must stay as it is.
        said = _run([sys.executable, "-B", "-c", code], place, f"{card}: its snippet fails")
    on = "the bundle" if is_whole else "small random weights under the bundle's settings"
    return f"the snippet of README.md runs on {on} and prints {len(said)} characters"


def _small_stand_in(folder: Path, place: Path) -> None:
    """A folder that differs from the bundle in nothing but its weights and what config.json says of their shape."""
    raw = dict(read_config(folder).raw)
    kept = {key: raw[key] for key in raw if key in SHARED_KEYS or key.endswith("_token_id")}
    lm = HybridLM(HybridConfig.from_dict({**kept, **SMALL}), kernels="torch")
    lm.init_weights(0)
    save_pretrained(lm, place)
    for path in folder.iterdir():
        is_other = path.suffix in (".safetensors", ".py") or path.name in (INDEX, "config.json")
        if path.is_file() and not is_other:
            shutil.copyfile(path, place / path.name)


def _object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: no JSON that can be read ({error})") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content
