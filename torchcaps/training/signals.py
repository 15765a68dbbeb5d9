"""Ctrl-C, SIGTERM and SIGHUP: asked for once, the run ends at the next step; asked for twice, at once."""

import signal
import threading
from types import FrameType
from typing import Any, Self

__all__ = ["Request"]


class Request:
    """Takes note of a wish to stop, while it is entered.

    Attributes:
        signal: the number of the signal that came, or 0.
    """

    # SIGHUP is a terminal that was closed; Windows has none.
    HEARD = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))

    def __init__(self) -> None:
        self.signal = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            self._before = {number: signal.signal(number, self._heard) for number in self.HEARD}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _heard(self, number: int, _frame: FrameType | None) -> None:
        if self.signal:  # the second time: whoever asks twice does not want to wait
            raise KeyboardInterrupt
        self.signal = number
