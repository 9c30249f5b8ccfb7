"""Signals that come during work which is not to be broken off."""

import os
import signal

import pytest

from flashtune.core.system.unbroken import unbroken


def test_every_signal_that_was_held_back_is_heard_once() -> None:
    heard: list[str] = []

    def sent(*numbers: signal.Signals) -> None:
        known = len(heard)
        with unbroken():
            for number in numbers:
                os.kill(os.getpid(), number)
            assert len(heard) == known

    before = signal.signal(signal.SIGTERM, lambda *_: heard.append("stop soon"))
    # A shell in the background has its children ignore interruptions.
    interrupted = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            sent(signal.SIGTERM, signal.SIGINT, signal.SIGTERM)
        assert heard == ["stop soon"]
        with pytest.raises(KeyboardInterrupt):
            sent(signal.SIGINT, signal.SIGTERM)
        assert heard == ["stop soon"] * 2
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, interrupted)
