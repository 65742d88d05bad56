"""A look at prepared rows: every token, what is trained on apart from the rest, boundaries visible.

In colour, trained text is green and bold, the rest dim, control tokens yellow. Without colour (a log, a pipe) trained
stretches stand between [[ and ]], so the mask is as visible there.
"""

import numpy as np
from rich.text import Text

from hymoe.engine.data.store import PackedRows
from hymoe.engine.data.tokenizer import Tokenizer

TRAINED, CONTEXT, CONTROL = "bold green", "dim", "yellow"


def document_of(rows: PackedRows, number: int) -> tuple[np.ndarray, np.ndarray, str]:
    """One document by its number in the folder: ids, trained, and where it lies."""
    row = int(np.searchsorted(rows.row_documents, number, side="right")) - 1
    ids, labels, cu_seqlens = rows[row]
    place = number - int(rows.row_documents[row])
    part = slice(int(cu_seqlens[place]), int(cu_seqlens[place + 1]))
    # A token is trained on where the one before has it as its label.
    trained = np.append(False, labels[part][:-1] != -100)
    return ids[part], trained, f"row {row}, tokens {part.start}..{part.stop - 1}"


def styled(ids: np.ndarray, trained: np.ndarray, tokenizer: Tokenizer, colour: bool) -> Text:
    """The text of a document with its mask."""
    text = Text()
    for start, stop in _stretches(ids, trained, tokenizer):
        on, part = bool(trained[start]), ids[start:stop].tolist()
        shown = tokenizer.decode(part)
        is_control = tokenizer.is_control(part[0])
        if colour:
            style = CONTROL if is_control and not on else TRAINED if on else CONTEXT
            text.append(shown, style=style)
        else:
            text.append(f"[[{shown}]]" if on else shown)
    return text


def _stretches(ids: np.ndarray, trained: np.ndarray, tokenizer: Tokenizer) -> list[tuple[int, int]]:
    """Runs of tokens that are shown alike: decoded together, so that characters of several tokens stay whole."""
    control = np.array([tokenizer.is_control(int(i)) for i in ids])
    kind = trained.astype(int) * 2 + (control & ~trained)
    cuts = np.flatnonzero(np.diff(kind)) + 1
    bounds = [0, *cuts.tolist(), len(ids)]
    return list(zip(bounds[:-1], bounds[1:], strict=True))
