"""Benchmarks' child processes for tests: everything runs in this process, and nothing is ever late."""

from collections.abc import Callable, Iterable, Iterator

from benchmarks.shared.children import Answer, Job


def in_this_process(jobs: Iterable[Job], asked: list[str]) -> Iterator[Answer]:
    """The jobs' answers; `asked` gets their names."""
    for task, words in jobs:
        asked.append(task.__name__)
        yield task(*words), ""


class Here:
    """In place of `children.Children`."""

    def __init__(self, asked: list[str]) -> None:
        self._asked = asked

    def __enter__(self) -> "Here":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def begin(self, job: Job) -> None:
        self._asked.append(job[0].__name__)

    def each(self, jobs: Iterable[Job]) -> Iterator[Answer]:
        return in_this_process(list(jobs), self._asked)

    def by(self, deadline: float, jobs: Iterable[Job], *, late: str, enough: Callable[[int], bool] | None = None) -> list[Answer]:
        return list(in_this_process(jobs, self._asked))
