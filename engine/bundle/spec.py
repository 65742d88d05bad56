"""BUNDLE.toml: what a served folder gets besides its weights. Paths are relative to the file.

name = "assistant-30b"                # of the model, in the card and serving_config.json
system_prompt = "system_prompt.txt"
template = "chatml"                   # or "base", the checkpoint's own, or a file
license = "other"                     # of the weights, as the hub spells it
contact = "team@example.org"
languages = ["en"]
intended_use = "intended_use.txt"
evaluations = ["instructions.json", "win_rate.json"]     # what evaluate.py wrote
shards = 16                           # weight files; without it, as the source has them

[generation]
temperature = 0.0                     # 0: greedy
repetition_penalty = 1.05
max_new_tokens = 2048
"""

from dataclasses import dataclass, field
from pathlib import Path

from hymoe.engine.errors import UserError
from hymoe.engine.sampling import Sampling
from hymoe.engine.typed_toml import from_table, read_toml


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """How the model is meant to be asked."""

    temperature: float = 0.0
    """0: the likeliest token."""
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    max_new_tokens: int = 2048
    max_input_tokens: int | None = None
    """Longest prompt; None: nothing is said."""
    stop_ids: tuple[int, ...] = ()
    """Besides those of config.json, generation_config.json and <|im_end|>."""
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class BundleSpec:
    """A whole BUNDLE.toml, its texts read.

    Attributes:
        folder: of the file; paths are relative to it.
        prompt_text: the system prompt.
        intended_use_text: what the model is for; None where nobody said.
    """

    folder: Path
    prompt_text: str
    intended_use_text: str | None
    name: str
    system_prompt: str
    template: str = "chatml"
    license: str | None = None
    license_name: str | None = None
    """Its name, where `license` is "other"."""
    contact: str | None = None
    languages: tuple[str, ...] = ()
    intended_use: str | None = None
    base_model: str | None = None
    """The base's id on the hub."""
    evaluations: tuple[str, ...] = ()
    evidence: str | None = None
    """evidence.json of the run; without it, looked for beside the weights."""
    shards: int | None = None
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)

    def path(self, name: str) -> Path:
        """A path of the file."""
        return self.folder / name


GIVEN = ("folder", "prompt_text", "intended_use_text", "generation")


def read_spec(path: Path) -> BundleSpec:
    """Reads and checks a BUNDLE.toml and the texts it names.

    Raises:
        UserError: what is wrong, with file and key.
    """
    raw = read_toml(path)
    table = raw.pop("generation", {})
    if not isinstance(table, dict):
        raise UserError(f"{path}: generation = {table!r}; expected a table [generation]")
    generation = from_table(f"{path}: [generation]", GenerationDefaults, table)
    _check_generation(path, generation)
    for key in GIVEN:
        if key in raw:
            raise UserError(f"{path}: {key} is unknown")
    for key in ("name", "system_prompt"):
        if not isinstance(raw.get(key), str) or not raw[key].strip():
            raise UserError(f"{path}: {key} = {raw.get(key)!r}; expected text")
    prompt = _text(path, "system_prompt", raw["system_prompt"])
    use = raw.get("intended_use")
    spec = from_table(
        f"{path}:",
        BundleSpec,
        raw,
        folder=path.parent,
        prompt_text=prompt,
        intended_use_text=None if use is None else _text(path, "intended_use", use),
        generation=generation,
    )
    for key in ("languages", "evaluations"):
        _all_are(path, key, getattr(spec, key), str)
    names = [Path(name).name for name in spec.evaluations]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{path}: evaluations: two files are called {name}; rename one")
    for name in (*spec.evaluations, *([spec.evidence] if spec.evidence else ())):
        if not spec.path(name).is_file():
            raise UserError(f"{path}: names {spec.path(name)}; no such file")
    if spec.shards is not None and spec.shards < 1:
        raise UserError(f"{path}: shards = {spec.shards}; expected 1 or more")
    return spec


def _check_generation(path: Path, generation: GenerationDefaults) -> None:
    try:
        Sampling(
            temperature=generation.temperature,
            top_p=generation.top_p,
            repetition_penalty=generation.repetition_penalty,
        )
    except UserError as error:
        raise UserError(f"{path}: [generation] {error}") from None
    for key in ("max_new_tokens", "max_input_tokens"):
        value = getattr(generation, key)
        if value is not None and value < 1:
            raise UserError(f"{path}: [generation] {key} = {value}; expected 1 or more")
    _all_are(path, "[generation] stop_ids", generation.stop_ids, int)
    _all_are(path, "[generation] stop_strings", generation.stop_strings, str)


def _all_are(path: Path, key: str, values: tuple[object, ...], kind: type) -> None:
    for value in values:
        if type(value) is not kind or value == "":
            raise UserError(f"{path}: {key} has {value!r}; expected only {kind.__name__}")


def _text(path: Path, key: str, name: object) -> str:
    """A text file that the bundle names; the line end that an editor leaves at its end is no part of it."""
    if not isinstance(name, str):
        raise UserError(f"{path}: {key} = {name!r}; expected the name of a file")
    file = path.parent / name
    try:
        text = file.read_bytes().decode("utf-8").removesuffix("\n").removesuffix("\r")
    except OSError as error:
        raise UserError(
            f"{file}: cannot be read ({error.strerror}); {key} of {path} names it"
        ) from None
    except UnicodeDecodeError:
        raise UserError(
            f"{file}: found bytes that are not UTF-8; {key} of {path} names it"
        ) from None
    if not text.strip():
        raise UserError(f"{file}: is empty; {key} of {path} names it")
    return text
