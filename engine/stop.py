"""A clean stop: a signal sets a flag, all ranks learn of it together, and leave together.

A signal never ends anything by itself. It is carried to the other ranks by a sum over all of them, at the end of
each step and at a few points before the first; so a rank alone with its signal, because another one has died and
torchrun ends the rest, finds no one to agree with and saves nothing.
"""

import signal
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopFlag:
    """Set by SIGINT, SIGTERM or SIGUSR1 on this rank.

    Any number of them is one. On Ctrl-C a rank gets SIGINT from the terminal and again from torchrun, so the second
    one changes nothing; a third is a person who will not wait, and interrupts at once.
    """

    def __init__(self) -> None:
        """Installs the handlers."""
        self.signal: str | None = None
        for number in SIGNALS:
            signal.signal(number, self._received)

    def _received(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal == "SIGINT":
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self.signal = signal.Signals(number).name

    def leave(self) -> None:
        """From now on signals do nothing.

        This process is on its way out; the interpreter's end would take the handlers away and die of the next one.
        """
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def __bool__(self) -> bool:
        """Whether a signal has come."""
        return self.signal is not None

    @property
    def reason(self) -> str:
        """What to say of a stop that this rank may know of from another."""
        return self.signal or "a signal on another rank"


class LeaveLoading(Exception):
    """Ends the loading of weights on a rank that has got a signal; the ranks agree on it afterwards."""
