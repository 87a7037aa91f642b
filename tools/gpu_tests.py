"""A part of tools/gpu_check.py: runs tests/gpu and reports each test function when it is done."""

import sys
from typing import Any

import pytest
from gpu_parts import ROOT
from gpu_task import Status, Task


class TellPlugin:
    """A pytest plugin that reports each test function when all of its cases are done."""

    def __init__(self, task: Task) -> None:
        self._task, self._name = task, ""
        self._ended: list[tuple[Status, str]] = []
        self._seconds = 0.0

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note a phase of a case; of passed phases, only the call counts."""
        name = report.nodeid.partition("[")[0].removeprefix("tests/gpu/")
        if name != self._name:
            self._tell()
            self._name = name
        self._seconds += report.duration
        if report.skipped:
            self._ended.append(("skipped", str(report.longrepr[-1]).removeprefix("Skipped: ")))
        elif report.failed:
            self._ended.append(("failed", f"{report.nodeid}: {report.longreprtext}"))
        elif report.when == "call":
            self._ended.append(("passed", ""))

    def pytest_sessionfinish(self) -> None:
        """Report the last function."""
        self._tell()

    def _tell(self) -> None:
        if not self._ended:
            return
        worst: list[Status] = ["failed", "skipped", "passed"]
        status = next(one for one in worst if any(ended == one for ended, _ in self._ended))
        reason = next(why for ended, why in self._ended if ended == status)
        num = len(self._ended)
        self._task.tell(self._name, status, reason, cases=num, seconds=self._seconds)
        self._ended, self._seconds = [], 0.0


def main() -> int:
    """Run pytest and return its exit code."""
    task = Task.of_arguments()
    words = ["-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT), "--durations=5"]
    words += ["--basetemp", str(task.work / "tmp"), str(ROOT / "tests" / "gpu")]
    return int(pytest.main(words, plugins=[TellPlugin(task)]))


if __name__ == "__main__":
    sys.exit(main())
