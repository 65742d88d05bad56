"""Which language a text is in, by the package `langdetect`, always with the same answer.

The detector draws random numbers; IFEval leaves its seed open, so that its verdicts on short or mixed texts
change from run to run. Here each text starts from SEED, in a detector of our own: no setting of the package is
touched.
"""

from functools import cache
from typing import Any

from hymoe.engine.errors import UserError

SEED = 0


def detect_language(text: str) -> str | None:
    """The code of the likeliest language (`en`, `zh-cn`), or None where no letter gives a hint.

    Raises:
        UserError: the package is not installed.
    """
    factory, failure = _detectors()
    detector = factory.create()
    detector.append(text)
    try:
        return detector.detect()
    except failure:
        return None


@cache
def _detectors() -> tuple[Any, type[Exception]]:
    try:
        from langdetect import DetectorFactory, LangDetectException
        from langdetect.detector_factory import PROFILES_DIRECTORY
    except ModuleNotFoundError as error:
        raise UserError(
            "constraints on the language need the package langdetect: pip install langdetect"
        ) from error
    factory = DetectorFactory()
    factory.load_profile(PROFILES_DIRECTORY)
    factory.seed = SEED
    return factory, LangDetectException
