"""Signals: SIGTERM, SIGUSR1 (a cluster that wants its machine back) and Ctrl-C ask a run to stop where it can go on later.

While it trains, the first one is kept until the next step boundary, where all processes stop together after saving. Before
that, and on a second Ctrl-C, a run ends where it is.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

NUMBERS = [signal.SIGTERM, signal.SIGINT, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else [])]  # not on Windows
ECHO_S = 1.0  # under torchrun one Ctrl-C arrives twice: from the terminal and from torchrun


class Interrupted(BaseException):
    """Somebody wants this process to end."""


@dataclass
class Stop:
    """can_wait: there is a next step boundary; asked: it is to be the last one."""

    can_wait: bool = False
    asked: bool = False
    asked_s: float = 0.0

    def ask(self, number: int, frame: object) -> None:
        is_impatient = number == signal.SIGINT and self.asked and time.monotonic() - self.asked_s > ECHO_S
        if not self.can_wait or is_impatient:
            raise Interrupted
        if not self.asked:
            self.asked, self.asked_s = True, time.monotonic()


@contextmanager
def signals_ask_to_stop() -> Iterator[Stop]:
    """Inside, the signals go to the Stop; afterwards they mean what they meant before."""
    stop = Stop()
    before = {number: signal.signal(number, stop.ask) for number in NUMBERS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore_signals() -> None:
    for number in NUMBERS:
        signal.signal(number, signal.SIG_IGN)
