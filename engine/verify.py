"""Is a written HF folder the model that it should be? Read back by other readers than ours, and compared.

1. **Folder.** Each shard opens with the `safetensors` package and says format = pt; every tensor is there once, with
   its dtype and shape, and nothing else; the index says where each lies, and their total size; config.json loads.
2. **Values.** Every tensor, bit for bit, with what the state it was made of gives (`convert.pieces`); tensors that
   the base only passes through with the base's.
3. **Logits.** Some random tokens through `transformers` and through ours, each in a process of its own, in the same
   dtype: float32 where memory suffices, else the files' own. There a bound cannot be a number: a score that is near
   another's chooses another expert, and a token's logits of 26 layers then differ by a third. So both are compared
   with our float32 arithmetic on the same weights, a layer at a time, by the error of the median token, and
   `transformers` may err by FACTOR times what ours does. Left out with a line where the model does not fit.

The reference clamps time steps below at `time_step_min`, whatever the config's `time_step_limit`; for the comparison
ours does so too.
"""

import contextlib
import importlib.util
import json
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hymoe.engine.convert import Say, Source, opened, pieces
from hymoe.engine.errors import UserError
from hymoe.engine.hf_checkpoint import (
    Checkpoint,
    load_dtypes,
    load_weights,
    materialize,
    read_config,
)
from hymoe.engine.hf_header import BITS
from hymoe.engine.hf_index import INDEX, TORCH_DTYPES
from hymoe.engine.hf_plan import METADATA, passed_through, wanted_tensors
from hymoe.engine.saver import available_bytes
from hymoe.model.config import HybridConfig
from hymoe.model.net import HybridLM

TOKENS = 48
BOUND = 1e-4  # relative error in float32; the reference itself errs by 2e-5 at 52 layers
FACTOR = 6.0  # in the files' dtype; 3.2 was the worst of 48 random models of 4 to 26 layers
MOST = 0.5  # whatever ours errs by; unrelated logits differ by 1.4
LOADING = (
    1.4  # memory of a model in transformers while it stacks its experts, over the model's bytes
)
BESIDE = (
    2 << 30
)  # bytes of a process that has imported torch and transformers, activations included


def verify(state: Path, out: Path, *, base: Path | None = None, say: Say) -> None:
    """Checks a folder against what it was made of.

    Args:
        state: saved state or HF folder, as `convert.choose` gives it.
        out: the folder to check.
        base: the base's folder, where it is no longer where the run found it.
        say: takes lines for a person.

    Raises:
        UserError: the first difference, by the tensor's name.
    """
    with opened(state, base) as source:
        config = _folder_loads(out)
        with _read_back(out) as back:
            _check_folder(out, back, source)
            count = _check_values(out, back, source)
    say(f"verified {out}: {count} tensors read back, each equal to {state}")
    _check_logits(out, config, say)


def _folder_loads(out: Path) -> HybridConfig:
    checkpoint = Checkpoint.open(out)
    config = read_config(out)
    checkpoint.check_against(config)
    return config


class _Back:
    """All tensors of a folder, by the `safetensors` package."""

    def __init__(self, files: dict[str, Any]) -> None:
        """Takes file name -> opened file."""
        self.files = files
        self.where: dict[str, str] = {}
        for file, handle in files.items():
            for name in handle.keys():  # noqa: SIM118 (a safe_open is no mapping)
                if name in self.where:
                    raise UserError(f"{file}: {name} is in {self.where[name]} too")
                self.where[name] = file

    def rows(self, name: str, first: int, count: int) -> Tensor:
        """Rows of a tensor."""
        return self.files[self.where[name]].get_slice(name)[first : first + count]

    def whole(self, name: str) -> Tensor:
        """A tensor of any dtype."""
        return self.files[self.where[name]].get_tensor(name)


@contextlib.contextmanager
def _read_back(out: Path) -> Iterator[_Back]:
    with contextlib.ExitStack() as stack:
        files = {}
        for file in sorted(out.glob("*.safetensors")):
            try:
                files[file.name] = stack.enter_context(safe_open(file, "pt"))
            except SafetensorError as error:
                raise UserError(f"{file}: safetensors cannot open it ({error})") from None
        yield _Back(files)


def _check_folder(out: Path, back: _Back, source: Source) -> None:
    """Every tensor of the plan once, in its dtype and shape; nothing else; an index that says so."""
    for file, handle in back.files.items():
        if handle.metadata() != METADATA:
            raise UserError(f"{out / file}: metadata {handle.metadata()}; expected {METADATA}")
    wanted = {t.name: t for t in wanted_tensors(source.specs, source.lm.config.dtype, source.base)}
    if missing := sorted(wanted.keys() - back.where.keys()):
        raise UserError(f"{out}: {missing[0]} is missing")
    if extra := sorted(back.where.keys() - wanted.keys()):
        raise UserError(f"{out / back.where[extra[0]]}: {extra[0]} is unexpected")
    for name, tensor in wanted.items():
        part = back.files[back.where[name]].get_slice(name)
        found = (part.get_dtype(), tuple(part.get_shape()))
        if found != (tensor.dtype, tensor.shape):
            raise UserError(
                f"{out / back.where[name]}: {name} is {found[0]} {list(found[1])}, "
                f"expected {tensor.dtype} {list(tensor.shape)}"
            )
    if len(back.files) > 1:
        index = json.loads((out / INDEX).read_text(encoding="utf-8"))
        total = sum(tensor.nbytes for tensor in wanted.values())
        if index["weight_map"] != back.where:
            odd = [n for n, file in back.where.items() if index["weight_map"].get(n) != file]
            raise UserError(
                f"{out / INDEX}: {odd[0]} lies in {back.where[odd[0]]}, it says otherwise"
            )
        if index["metadata"]["total_size"] != total:
            found = index["metadata"]["total_size"]
            raise UserError(f"{out / INDEX}: total_size = {found}, expected {total}")


def _check_values(out: Path, back: _Back, source: Source) -> int:
    """Compares every tensor bit for bit; returns how many there are."""
    differing: dict[str, int] = {}
    for name, first, rows in pieces(source):
        dtype = TORCH_DTYPES[source.base.entries[name].dtype]
        expected, found = _bits(rows.to(dtype)), _bits(back.rows(name, first, len(rows)))
        if not torch.equal(expected, found):
            count = int((expected != found).sum())
            differing[name] = differing.get(name, 0) + count
    for entry in passed_through(source.base):
        found, at = _bits(back.whole(entry.name)), 0
        for piece in source.base.raw(entry.name):
            expected = torch.frombuffer(bytearray(piece), dtype=torch.uint8)
            if not torch.equal(expected, found[at : at + len(piece)]):
                count = int((expected != found[at : at + len(piece)]).sum())
                differing[entry.name] = differing.get(entry.name, 0) + count
            at += len(piece)
    if differing:
        name, count = next(iter(differing.items()))
        more = f", and {len(differing) - 1} more tensors differ" if len(differing) > 1 else ""
        raise UserError(
            f"{out / back.where[name]}: {name} differs from what it was made of in {count:,} bytes{more}"
        )
    return len(back.where)


def _bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, flat: equal NaNs are equal, zeros of two signs are not."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _check_logits(out: Path, config: HybridConfig, say: Say) -> None:
    """Compares a forward pass, where that is possible."""
    if importlib.util.find_spec("transformers") is None:
        say(
            "forward pass not compared: transformers is not installed (pip install 'transformers>=5.24')"
        )
        return
    entries = [e for n, e in Checkpoint.open(out).entries.items() if not n.startswith("mtp.")]
    stored = max((e.dtype for e in entries), key=lambda d: sum(e.dtype == d for e in entries))
    numbers = sum(e.nbytes * 8 // BITS[e.dtype] for e in entries)
    free = available_bytes()
    for dtype in dict.fromkeys((torch.float32, TORCH_DTYPES[stored])):
        needed = int(numbers * dtype.itemsize * LOADING) + BESIDE
        if needed <= free:
            error, bound = logits_error(out, config, dtype)
            word = str(dtype).removeprefix("torch.")
            figure = f"logits of transformers and ours differ by {error:.2e} in {word}"
            if not error <= bound:  # a NaN is above every bound
                raise UserError(f"{out}: {figure}, more than {bound:.1e}")
            say(f"{figure} (bound {bound:.1e})")
            return
    say(
        f"forward pass not compared: it needs {needed / 1e9:.1f} GB of memory in {stored}, {free / 1e9:.1f} GB are free"
    )


def logits_error(out: Path, config: HybridConfig, dtype: torch.dtype) -> tuple[float, float]:
    """How far the logits of transformers are from ours, and how far they may be.

    Args:
        out: HF folder.
        config: its.
        dtype: of weights and arithmetic; small tensors of ours and the router's of theirs are float32 always.

    Returns:
        Norm of the difference over norm of the reference, which is ours in float32 arithmetic: of all logits in
        float32, else of the median token; the bound.

    Raises:
        UserError: one of them cannot run the folder.
    """
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (TOKENS,), generator=rng).tolist()

    def logits(run: Callable[..., Any]) -> Tensor:
        return _in_a_process(run, str(out), ids, dtype)

    theirs, exact = logits(_theirs_logits), logits(_exact_logits)
    if dtype == torch.float32:
        return float((theirs - exact).norm() / exact.norm()), BOUND
    own = _median_error(logits(_ours_logits), exact)
    return _median_error(theirs, exact), min(MOST, FACTOR * own)


def _median_error(logits: Tensor, exact: Tensor) -> float:
    """Relative error of the tokens' logits: the median, which a few tokens with another expert do not move."""
    return float(((logits - exact).norm(dim=1) / exact.norm(dim=1)).median())


def _in_a_process(
    run: Callable[..., Any], folder: str, ids: list[int], dtype: torch.dtype
) -> Tensor:
    """Runs a forward pass where its memory goes back to the system, and its death is not ours."""
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            logits = pool.submit(run, folder, ids, dtype).result()
    except BrokenProcessPool:
        raise UserError(
            f"{folder}: the process of {run.__name__} died, of memory perhaps"
        ) from None
    return torch.from_numpy(logits)


def _ours_logits(folder: str, ids: list[int], dtype: torch.dtype) -> Any:
    return _logits(_ours(folder, dtype), ids)


def _exact_logits(folder: str, ids: list[int], dtype: torch.dtype) -> Any:
    """Weights of `dtype`, arithmetic in float32: each layer is made float32 when its turn comes, and then dropped."""
    lm = _ours(folder, dtype)
    for part in (lm.embeddings, lm.norm_f, lm.head):
        part.float()
    for layer in lm.layers:
        layer.register_forward_pre_hook(lambda module, inputs: module.float() and None)
        layer.register_forward_hook(lambda module, inputs, output: module.to("meta") and None)
    return _logits(lm, ids)


def _ours(folder: str, dtype: torch.dtype) -> HybridLM:
    checkpoint, config = Checkpoint.open(folder), read_config(folder)
    clamp = {"time_step_limit": [config.time_step_min, float("inf")]}
    lm = HybridLM(
        HybridConfig.from_dict({**config.to_dict(), **clamp}), kernels="torch", device="meta"
    )
    materialize(lm, "cpu", load_dtypes(checkpoint, checkpoint.check_against(lm.config), dtype))
    load_weights(lm, checkpoint)
    return lm


def _logits(lm: HybridLM, ids: list[int]) -> Any:
    with torch.no_grad():
        hidden = lm(torch.tensor(ids), torch.tensor([0, len(ids)], dtype=torch.int32))
        return lm.logits(hidden).float().numpy()


def _theirs_logits(folder: str, ids: list[int], dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        lm, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    except Exception as error:  # whatever it is, the folder does not load
        raise UserError(f"{folder}: transformers cannot load it ({_one_line(error)})") from None
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = [str(name) for name in report[problem] if not str(name).startswith("mtp.")]
        if names:
            raise UserError(f"{folder}: transformers reports {problem}: {names[0]}")
    with torch.no_grad():
        logits = lm.eval()(torch.tensor([ids]), use_cache=False).logits
    return logits[0].float().numpy()


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
