"""The served folder: weights, tokenizer, template, prompt, settings, evidence and notes; whole, or not at all.

| file | from |
|---|---|
| `*.safetensors`, index | the run's export, linked; or written anew (`convert.py`) in the asked number of shards |
| `config.json` | the source's; `eos_token_id` is every stop id |
| `generation_config.json` | the source's ids, BUNDLE.toml's defaults |
| tokenizer files | the source's; the template is also in `tokenizer_config.json`, its `eos_token` is `<|im_end|>` |
| `chat_template.jinja`, `system_prompt.txt` | BUNDLE.toml |
| `serving_config.json` | all that a server needs to ask the model as it was measured |
| `training_evidence.json` | the run's own evidence, hashes of the bundle's files, figures of the evaluations |
| `evaluation/` | the files of the evaluations |
| `README.md` and notes | `card.py` |

Stop ids are the union of the source's generation_config.json and config.json, `<|im_end|>` and BUNDLE.toml's, and the
same in all files. It is written as `.NAME.partial`, checked as a whole (`check.py`), and renamed. Other files
of the source stay behind, with a line.
"""

import json
import os
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hymoe.engine import checkpoint_files as files
from hymoe.engine.bundle import card
from hymoe.engine.bundle.check import EVALUATIONS, TRAINING_EVIDENCE, Load, check_bundle, end_token
from hymoe.engine.bundle.spec import BundleSpec, read_spec
from hymoe.engine.convert import convert
from hymoe.engine.data.chat import CHAT_TEMPLATE
from hymoe.engine.data.tokenizer import IM_END, Tokenizer
from hymoe.engine.errors import UserError
from hymoe.engine.eval.figures import read_figures, read_object
from hymoe.engine.generate import stop_ids
from hymoe.engine.hf_checkpoint import Checkpoint
from hymoe.engine.hf_index import INDEX
from hymoe.engine.provenance import described, sha256_of
from hymoe.engine.resume import EVIDENCE

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model"),
)
SETTINGS = ("config.json", "generation_config.json")
# Licence texts go along, as most licences ask; so does code that config.json's auto_map may name.
KEPT = ("license", "notice", "copying")

Say = Callable[[str], None]


def make_bundle(
    spec_file: Path,
    source: Path,
    out: Path,
    *,
    max_shard_size: str | None = None,
    shards: int | None = None,
    load: Load = "auto",
    say: Say,
) -> None:
    """Writes a bundle.

    Args:
        spec_file: BUNDLE.toml.
        source: run folder, saved state, or HF folder.
        out: the folder to be, absent or empty.
        max_shard_size: most bytes of a weight file, such as "4GB".
        shards: exactly so many weight files; wins over BUNDLE.toml's.
        load: how the check loads it, see `check.py`.
        say: takes lines for a person.

    Raises:
        UserError: bad input, or a bundle that does not hold together; nothing is left behind.
    """
    spec = read_spec(spec_file)
    if max_shard_size is not None and shards is not None:
        raise UserError("shards and max_shard_size: expected one of them")
    out = Path(os.path.realpath(out))
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise UserError(f"{out}: exists; expected a folder, absent or empty")
    if not source.is_dir():
        raise UserError(f"{source}: no such folder; expected a run, a saved state or an HF folder")
    measured = [(spec.path(name), *read_figures(spec.path(name))) for name in spec.evaluations]
    weights = _exported(source) or source
    run = _run_evidence(spec, source, weights, say)
    if max_shard_size is None and shards is None:
        shards = spec.shards
    partial = out.parent / f".{out.name}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        _write_weights(weights, partial, run, max_shard_size, shards, say)
        _drop_others(partial, say)
        ends = _write_settings(spec, partial)
        _write_texts(spec, partial, ends)
        evaluations = _write_evaluations(measured, partial)
        evidence = _evidence(spec, run, ends, evaluations, partial, say)
        notes = card.write_notes(partial, spec, evidence)
        _write_json(partial / TRAINING_EVIDENCE, {**evidence, "notes": notes})
        for line in check_bundle(partial, load=load, say=say):
            say(f"check   {line}")
        _publish(partial, out)
    except OSError as error:
        raise UserError(f"{error.filename or out}: {error.strerror or error}") from None
    except UserError as error:
        raise UserError(str(error).replace(str(partial), str(out))) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    for gap in evidence["gaps"]:
        say(f"gap     {gap}")
    say(f"bundle  {out}")


def _exported(source: Path) -> Path | None:
    """The export of a finished run, by its evidence."""
    if not (source / EVIDENCE).is_file():
        return None
    export = read_object(source / EVIDENCE).get("export")
    folder = source / export["folder"] if export else None
    return folder if folder is not None and folder.is_dir() else None


def _run_evidence(spec: BundleSpec, source: Path, weights: Path, say: Say) -> dict[str, Any] | None:
    """What the run says of itself; None where nothing is found that speaks of these weights.

    Raises:
        UserError: it speaks of other weights.
    """
    is_state = bool(files.NAME.fullmatch(source.name)) and not (source / "config.json").is_file()
    if spec.evidence is not None:
        path = spec.path(spec.evidence)
    elif is_state:
        path = source.parent.parent / EVIDENCE
    elif (source / "config.json").is_file():
        path = source.parent / EVIDENCE
    else:
        path = source / EVIDENCE
    if not path.is_file():
        return None
    found = read_object(path)
    if "recipe_sha256" not in found or "steps" not in found:
        raise UserError(f"{path}: expected the evidence.json that a run wrote")
    export = found.get("export") or {}
    if is_state and found["steps"] != files.step_of(source):
        say(f"bundle  {path} is of step {found['steps']}, {source} is not: left out")
        return None
    if not (weights / "config.json").is_file():
        return found
    if spec.evidence is None and export.get("folder") != weights.name:
        say(f"bundle  {path} does not speak of {weights.name}: left out")
        return None
    if export.get("weights"):
        say("bundle  comparing the weights with the run's evidence")
        _compare_weights(path, export["weights"], weights)
    return found


def _compare_weights(path: Path, stated: dict[str, Any], weights: Path) -> None:
    names = {file.name for file in weights.glob("*.safetensors")}
    for name in sorted(names ^ stated.keys()):
        where = "not in the evidence" if name in names else f"missing from {weights}"
        raise UserError(f"{path}: weight file {name} is {where}; expected the run's own export")
    for name, now in described(weights, names).items():
        if now["sha256"] != stated[name]["sha256"]:
            raise UserError(
                f"{weights / name}: sha256 {now['sha256'][:16]}, the run's evidence {path} says "
                f"{stated[name]['sha256'][:16]}; expected the run's own export"
            )


def _write_weights(
    weights: Path,
    partial: Path,
    run: dict[str, Any] | None,
    max_shard_size: str | None,
    shards: int | None,
    say: Say,
) -> None:
    """An HF folder whose files are as asked for is linked (copied between disks), all else is written anew."""
    if (weights / "config.json").is_file():
        names = {entry.file.name for entry in Checkpoint.open(weights).entries.values()}
        if max_shard_size is None and shards in (None, len(names)):
            partial.mkdir(parents=True)
            for name in sorted(names):
                _link(weights / name, partial / name)
            for path in weights.iterdir():
                if path.suffix != ".safetensors" and path.is_file() and _has_place(path.name):
                    shutil.copyfile(path, partial / path.name)
            say(f"bundle  {len(names)} weight files of {weights}")
            return
    step = convert(
        weights, partial, max_shard_size=max_shard_size or "5GB", shards=shards, say=say
    ).step
    if run is not None and step is not None and step != run["steps"]:
        raise UserError(
            f"{weights}: the newest state is of step {step}, the evidence of step {run['steps']}"
        )


def _link(source: Path, target: Path) -> None:
    real = Path(os.path.realpath(source))
    try:
        os.link(real, target)
    except OSError:  # another disk, or a file system without links
        shutil.copyfile(real, target)


def _write_texts(spec: BundleSpec, folder: Path, ends: list[int]) -> None:
    """Prompt and template, which is also in tokenizer_config.json, where the end token must be one that stops."""
    source = _template_text(spec, folder)
    (folder / "chat_template.jinja").write_bytes(source.encode())
    (folder / "system_prompt.txt").write_bytes(spec.prompt_text.encode())
    tokenizer = Tokenizer(folder)
    path = folder / "tokenizer_config.json"
    settings = read_object(path) if path.is_file() else {"clean_up_tokenization_spaces": False}
    settings.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    # A template may write the end token, so one that stops stays as it was in training.
    if tokenizer.id_of(end_token(settings) or "") not in ends:
        settings["eos_token"] = IM_END
    _write_json(path, {**settings, "chat_template": source})
    special = folder / "special_tokens_map.json"
    if special.is_file():
        _write_json(special, {**read_object(special), "eos_token": settings["eos_token"]})


def _template_text(spec: BundleSpec, folder: Path) -> str:
    if spec.template == "chatml":
        return CHAT_TEMPLATE
    is_base = spec.template == "base"
    file = folder / "chat_template.jinja" if is_base else spec.path(spec.template)
    if file.is_file():
        return file.read_text(encoding="utf-8")
    if not is_base:
        raise UserError(f"{file}: no such chat template; expected a file, 'base' or 'chatml'")
    path = folder / "tokenizer_config.json"
    source = read_object(path).get("chat_template") if path.is_file() else None
    if not isinstance(source, str):
        raise UserError(
            f"{folder}: found no chat_template.jinja and no chat_template in tokenizer_config.json; "
            "use template = 'chatml' or name a file"
        )
    return source


def _write_settings(spec: BundleSpec, folder: Path) -> list[int]:
    """config.json, generation_config.json, serving_config.json; returns the stop ids."""
    asked = spec.generation
    ends = sorted(stop_ids(folder, Tokenizer(folder)) | set(asked.stop_ids))
    config_file = folder / "config.json"
    config = read_object(config_file)
    config["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    _write_json(config_file, config)
    path = folder / "generation_config.json"
    before = read_object(path) if path.is_file() else {}
    ids = {
        key: before.get(key, config.get(key))
        for key in ("bos_token_id", "pad_token_id")
        if before.get(key, config.get(key)) is not None
    }
    how: dict[str, Any] = {"do_sample": asked.temperature > 0}
    if asked.temperature > 0:
        how |= {"temperature": asked.temperature, "top_p": asked.top_p, "top_k": 0}
    how |= {
        "repetition_penalty": asked.repetition_penalty,
        "max_new_tokens": asked.max_new_tokens,
    }
    _write_json(path, {**ids, "eos_token_id": ends, **how})
    serving = {
        "model": spec.name,
        "system_prompt_file": "system_prompt.txt",
        "chat_template_file": "chat_template.jinja",
        "stop_token_ids": ends,
        "stop": list(asked.stop_strings),
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "repetition_penalty": asked.repetition_penalty,
        "max_new_tokens": asked.max_new_tokens,
        "max_input_tokens": asked.max_input_tokens,
    }
    _write_json(folder / "serving_config.json", serving)
    return ends


def _write_evaluations(
    measured: list[tuple[Path, str, list[dict[str, Any]]]], folder: Path
) -> list[dict[str, Any]]:
    found = []
    for path, kind, figures in measured:
        target = folder / EVALUATIONS / path.name
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)
        name = target.relative_to(folder).as_posix()
        found.append({"file": name, "sha256": sha256_of(target), "kind": kind, "figures": figures})
    return found


def _has_place(name: str) -> bool:
    """Whether a file at the top of a checkpoint belongs into a bundle."""
    kept = (*SETTINGS, *TOKENIZER_FILES, INDEX, "chat_template.jinja")
    return name in kept or name.endswith((".safetensors", ".py")) or name.lower().startswith(KEPT)


def _drop_others(folder: Path, say: Say) -> None:
    """Removes what came along with the weights and has no place in a bundle."""
    has_code = bool(read_object(folder / "config.json").get("auto_map"))
    for path in sorted(folder.iterdir()):
        stays = path.is_file() and _has_place(path.name)
        if stays and (has_code or path.suffix != ".py"):
            continue
        say(f"bundle  left out {path.name} of the source")
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _evidence(
    spec: BundleSpec,
    run: dict[str, Any] | None,
    ends: list[int],
    evaluations: list[dict[str, Any]],
    folder: Path,
    say: Say,
) -> dict[str, Any]:
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    weights = {name for name in names if name.endswith(".safetensors")}
    say(f"bundle  hashing {len(names)} files")
    return {
        "format": "hymoe bundle evidence 1",
        "name": spec.name,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "run": run,
        "stop_token_ids": ends,
        "weights": described(folder, weights),
        "files": described(folder, names - weights),
        "evaluations": evaluations,
        "gaps": _gaps(spec, run, evaluations),
    }


def _gaps(
    spec: BundleSpec, run: dict[str, Any] | None, evaluations: list[dict[str, Any]]
) -> list[str]:
    """What a reader would ask and nobody has said or measured."""
    absent = [
        (run is None, "training: no evidence of a run was found for these weights"),
        (run is not None and not run.get("base_revision"), "base: its revision is not known"),
        (not evaluations, "evaluation: nothing was measured"),
        (spec.intended_use_text is None, "intended use: not stated (intended_use)"),
        (spec.license is None, "licence: not stated (license)"),
        (spec.contact is None, "contact: not stated (contact)"),
        (not spec.languages, "languages: not stated (languages)"),
        (
            run is not None and (run.get("data") or {}).get("system_prompt") != spec.prompt_text,
            "system prompt: the training data was not rendered under the one that is served",
        ),
    ]
    return [line for is_absent, line in absent if is_absent]


def _publish(partial: Path, out: Path) -> None:
    """Everything on disk, then the name."""
    for path in [*partial.rglob("*"), partial]:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    os.rename(partial, out)  # onto an empty folder, or nothing


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
