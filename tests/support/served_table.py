"""The table that `pytest --table FILE` writes: a line for each file of tests, with who served the calls of those that say so.

A test says it by the fixture record_property: `record_property("served", "torch")`.
"""

import platform
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch


class ServedTable:
    """Counts reports of tests by their file, and writes the table at the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.outcomes: dict[str, Counter[str]] = defaultdict(Counter)
        self.served: dict[str, Counter[str]] = defaultdict(Counter)
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        suite = report.nodeid.split("::")[0].rsplit("/", 1)[-1].removesuffix(".py")
        if report.failed:
            self.failed.append(report.nodeid)
        if report.when == "call" or report.failed or (report.when == "setup" and report.skipped):
            self.outcomes[suite]["failed" if report.failed else "skipped" if report.skipped else "passed"] += 1
        if report.when == "teardown":
            self.served[suite].update(str(said) for name, said in report.user_properties if name == "served")

    def pytest_sessionfinish(self) -> None:
        from triton import __version__ as triton

        machine = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
        lines = [f"{machine}, torch {torch.__version__}, Triton {triton}", ""]
        lines.append(f"{'suite':<32}{'passed':>8}{'failed':>8}{'skipped':>9}  who served")
        for suite, counts in sorted(self.outcomes.items()):
            who = ", ".join(f"{name} {count}" for name, count in self.served[suite].most_common())
            lines.append(f"{suite:<32}{counts['passed']:>8}{counts['failed']:>8}{counts['skipped']:>9}  {who}".rstrip())
        lines += ["", "failed:", *sorted(self.failed)] if self.failed else []
        self.path.write_text("\n".join(lines) + "\n")
