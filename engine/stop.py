"""A clean stop: a signal sets a flag, all ranks learn of it at the end of a step, and leave together."""

import signal
from types import FrameType


class StopFlag:
    """Set by SIGINT, SIGTERM or SIGUSR1 on this rank; the loop carries it to the others with the step's sums.

    On Ctrl-C a rank gets SIGINT from the terminal and again from torchrun, so the second one changes nothing; a third
    is a person who will not wait, and interrupts at once.
    """

    def __init__(self) -> None:
        """Installs the handlers."""
        self.signal: str | None = None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._received)

    def _received(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal == "SIGINT":
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self.signal = signal.Signals(number).name

    def __bool__(self) -> bool:
        """Whether a signal has come."""
        return self.signal is not None
