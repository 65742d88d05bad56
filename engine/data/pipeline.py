"""From a mixture to packed rows on disk: rows are read, chosen, rendered in worker processes, packed and written.

**Same bytes.** Which rows are taken follows from seed, source name and row number; what a row becomes from the recipe
alone; results are collected in the order of the files. So neither the number of workers nor the machine matters.

**Memory** does not grow with the text: chunks of a few hundred rows travel to the workers, tokens go to a spool beside
the output, and a few bytes a document (where it is, how long) stay. Packing looks at WINDOW documents at a time.

**Selection.** Every source has a random order of its rows; rows are looked at in that order until `count` usable ones
are found. Only as many rows as are likely needed are rendered, then more if they did not do.
"""

import contextlib
import hashlib
import multiprocessing
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hymoe.engine.data import formats, sources
from hymoe.engine.data.mixture import Mixture, Source
from hymoe.engine.data.pack import pack_best_fit
from hymoe.engine.data.render import Document, Rules
from hymoe.engine.data.spool import Outcomes, Spool, render_chunk, start_worker
from hymoe.engine.data.statistics import SourceStats
from hymoe.engine.data.store import PackedWriter
from hymoe.engine.errors import UserError

WINDOW = (
    1 << 17
)  # documents that are packed together: best fit is then within a fraction of a percent of full rows
AHEAD = 4  # chunks a worker that are read before they are needed

Progress = Callable[[str], None]


def prepare(
    mixture: Mixture, base: Path | None, out: Path, workers: int, say: Progress
) -> dict[str, Any]:
    """Prepares a mixture.

    Args:
        mixture: the recipe.
        base: the checkpoint's folder, where tokenizer or template is "base".
        out: folder to make.
        workers: processes that render; 1 renders here.
        say: takes lines for a person.

    Returns:
        The manifest.

    Raises:
        UserError: a source, row or file that cannot be used; nothing is left behind.
    """
    rules = rules_of(mixture, base)
    files = {s.name: sources.expand(s.path, mixture.folder) for s in mixture.sources}
    writer = PackedWriter(out, mixture.seq_len)
    try:
        seen: set[bytes] = set()
        units: list[_Taken] = []
        with _workers(rules, workers) as pool:
            for source in mixture.sources:
                spool = Spool(writer.partial / f"spool_{len(units)}")
                taken = _take(source, files[source.name], mixture, spool, pool, seen, say)
                units.append(taken)
                say(taken.stats.line())
        _write_rows(units, mixture, writer, say)
        for taken in units:
            taken.spool.remove()
        return writer.finish(
            recipe=mixture.as_dict(),
            recipe_sha256=mixture.sha256,
            tokenizer_sha256=hashlib.sha256(_tokenizer_file(rules).read_bytes()).hexdigest(),
            system_prompt=rules.system_prompt,
            sources=[taken.stats.as_dict() for taken in units],
        )
    except BaseException:
        writer.abandon()
        raise


def rules_of(mixture: Mixture, base: Path | None) -> Rules:
    """What the renderer needs of a mixture.

    Raises:
        UserError: "base" is named and there is none.
    """
    for key in ("tokenizer", "chat_template"):
        if getattr(mixture, key) == "base" and base is None:
            raise UserError(f"{key} = 'base': name the checkpoint's folder with --base")
    is_name = mixture.chat_template in ("base", "chatml")
    tokenizer = base if mixture.tokenizer == "base" else mixture.resolved(mixture.tokenizer)
    assert tokenizer is not None
    return Rules(
        tokenizer=tokenizer,
        chat_template=mixture.chat_template
        if is_name
        else str(mixture.resolved(mixture.chat_template)),
        base=base or tokenizer,
        system_prompt=mixture.prompt_text(),
        seq_len=mixture.seq_len,
        too_long=mixture.too_long,
    )


def _tokenizer_file(rules: Rules) -> Path:
    return rules.tokenizer / "tokenizer.json" if rules.tokenizer.is_dir() else rules.tokenizer


@dataclass
class _Taken:
    """What was chosen of a source: units are conversations, one or more documents each."""

    spool: Spool
    stats: SourceStats
    units: np.ndarray  # int64, numbers of units in the spool, with repetitions


@contextlib.contextmanager
def _workers(rules: Rules, workers: int) -> Iterator[Executor | None]:
    if workers == 1:
        start_worker(rules)
        yield None
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, start_worker, (rules,))
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _take(
    source: Source,
    files: list[Path],
    mixture: Mixture,
    spool: Spool,
    pool: Executor | None,
    seen: set[bytes],
    say: Progress,
) -> _Taken:
    """Looks at a source's rows in its random order until enough are usable."""
    total = sources.count_rows(files)
    if total == 0:
        raise UserError(
            f"{source.path}: found no rows in {len(files)} files (source {source.name})"
        )
    if source.where:
        sources.check_where(source.where, sources.columns_of(files), f"source {source.name}")
    stats = SourceStats(source.name, asked=_asked(source), rows_in_source=total)
    random = np.random.default_rng([mixture.seed, *source.name.encode()])
    order = random.permutation(total) if source.count or source.fraction else np.arange(total)
    if source.fraction:
        order = order[: round(source.fraction * total)]
    chosen = array("i")
    looked = 0
    while looked < len(order) and (source.count is None or len(chosen) < source.count):
        goal = len(order) if source.count is None else source.count - len(chosen)
        share = max(len(chosen), 1) / max(looked, 1) if looked else 1.0
        more = order[looked : looked + int(goal / share * 1.1) + 64]
        say(f"{source.name}: rendering {len(more):,} of {total:,} rows")
        outcomes = _render(source, mixture, files, more, total, spool, pool)
        for row in more.tolist():
            looked += 1
            reason = outcomes.reason(row)
            if reason is None and mixture.deduplicate:
                digest = outcomes.digest(row)
                if digest in seen:
                    reason = "duplicate"
                seen.add(digest)
            if reason is not None:
                stats.dropped[reason] += 1
                continue
            chosen.append(outcomes.unit[row])
            stats.cut += int(outcomes.cut[row])
            if len(chosen) == source.count:
                break
    stats.rows_read, stats.rows_taken = looked, len(chosen)
    if not chosen:
        raise UserError(
            f"source {source.name} ({source.path}): none of {looked:,} rows is usable "
            f"({stats.reasons()}); expected at least one"
        )
    units = np.array(chosen, dtype=np.int64)
    if source.count is not None and source.count > len(units):
        full, rest = divmod(source.count, len(units))
        units = np.concatenate([np.tile(units, full), units[:rest]])
    units = np.tile(units, source.repeat)
    _measure(stats, spool, units)
    return _Taken(spool, stats, units)


def _asked(source: Source) -> str:
    much = "all" if source.count is None else f"{source.count:,}"
    if source.fraction is not None:
        much = f"{source.fraction:g} of the rows"
    return much + (f" x {source.repeat}" if source.repeat > 1 else "")


def _measure(stats: SourceStats, spool: Spool, units: np.ndarray) -> None:
    documents = spool.documents_of(units)
    lengths = spool.lengths()[documents]
    stats.conversations, stats.documents = len(units), len(documents)
    stats.tokens, stats.longest = int(lengths.sum()), int(lengths.max())
    stats.supervised_tokens = int(spool.supervised()[documents].sum())


def _render(
    source: Source,
    mixture: Mixture,
    files: list[Path],
    rows: np.ndarray,
    total: int,
    spool: Spool,
    pool: Executor | None,
) -> Outcomes:
    """Renders some rows of a source into the spool, in the order of the files."""
    wanted = np.zeros(total, dtype=np.bool_)
    wanted[rows] = True

    columns = None
    if all(
        file.suffix == ".parquet" for file in files
    ):  # where a column that is not read costs nothing
        format_ = formats.recognise(
            sources.columns_of(files), source.format, f"source {source.name}"
        )
        columns = {*format_.columns, *source.where}

    def tasks() -> Iterator[tuple[Any, np.ndarray, Source, int]]:
        for chunk in sources.chunks(files, columns):
            mine = wanted[chunk.first_row : chunk.first_row + chunk.num_rows]
            if mine.any():
                yield chunk, mine, source, mixture.seed

    outcomes = Outcomes(total, mixture.deduplicate)
    for result in _in_order(tasks(), pool):
        if result.broken and mixture.broken == "refuse":
            raise UserError(result.broken[0])
        outcomes.add(result, spool)
    return outcomes


def _in_order(tasks: Iterable[tuple[Any, ...]], pool: Executor | None) -> Iterator[Any]:
    """Results in the order of the tasks; of a source of any size only a few chunks are in memory."""
    if pool is None:
        yield from (render_chunk(*task) for task in tasks)
        return
    limit = AHEAD * pool._max_workers  # type: ignore[attr-defined]
    waiting: deque[Any] = deque()
    for task in tasks:
        waiting.append(pool.submit(render_chunk, *task))
        if len(waiting) >= limit:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _write_rows(units: list[_Taken], mixture: Mixture, writer: PackedWriter, say: Progress) -> None:
    """Shuffles the documents of all sources together, packs them window by window, and writes the rows."""
    documents = [taken.spool.documents_of(taken.units) for taken in units]
    origin = np.repeat(np.arange(len(units), dtype=np.int16), [len(d) for d in documents])
    number = np.concatenate(documents)
    lengths = np.concatenate(
        [taken.spool.lengths()[d] for taken, d in zip(units, documents, strict=True)]
    )
    order = np.random.default_rng([mixture.seed, 1]).permutation(len(number))
    for first in range(0, len(order), WINDOW):
        window = order[first : first + WINDOW]
        packing = pack_best_fit(lengths[window].tolist(), mixture.seq_len, mixture.seed)
        for row in packing:
            writer.add([_document(units, origin[i], number[i]) for i in window[row]])
        say(f"packed {min(first + WINDOW, len(order)):,} of {len(order):,} documents")


def _document(units: list[_Taken], origin: int, number: int) -> Document:
    return units[origin].spool.document(int(number))
