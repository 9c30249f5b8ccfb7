"""Calls in daemon threads, which neither the end of a block (as with an executor) nor of the process waits for."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def begun(call: Callable[P, T], *arguments: P.args, **kwargs: P.kwargs) -> "Future[T]":
    """The future of a call in a new daemon thread, which an interruption of the waiting thread doesn't end."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call(*arguments, **kwargs))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
