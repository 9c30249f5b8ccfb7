"""Calls in threads that nobody waits for: neither the end of a block, as an executor does, nor the end of the process."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def begun(call: Callable[P, T], *arguments: P.args, **words: P.kwargs) -> "Future[T]":
    """The future of a call that a thread of its own makes from now on; an interruption of who waits for it leaves the thread behind."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call(*arguments, **words))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
