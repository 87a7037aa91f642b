"""What a part of tools/gpu_check.py is given, and how it reports what it found.

    python tools/gpu_X.py FIGURES WORK DEVICE SECONDS

A part appends a JSON line to FIGURES as soon as it has tried something, so that its results are
kept if it is cut off.
"""

import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Status = Literal["passed", "failed", "skipped"]
MAX_WORDS = 600  # characters of a reason; the log has the rest


@dataclass(frozen=True)
class Task:
    """A part's task: its folder ``work``, its device, and when (``time.monotonic``) it must be
    done.
    """

    figures: Path
    work: Path
    device: Literal["cuda", "cpu"]
    until_s: float

    @classmethod
    def of_arguments(cls) -> "Task":
        """Read the words of the command line."""
        figures, work, device, seconds = sys.argv[1:5]
        until_s = time.monotonic() + float(seconds)
        return cls(Path(figures), Path(work), "cpu" if device == "cpu" else "cuda", until_s)

    @property
    def uses_gpu(self) -> bool:
        """Whether this checks a GPU, rather than testing the tool at toy size."""
        return self.device == "cuda"

    def left_s(self) -> float:
        """Return the seconds until the limit."""
        return self.until_s - time.monotonic()

    def tell(self, name: str, status: Status = "passed", reason: str = "", **found: Any) -> None:
        """Append what was found of ``name``."""
        said: dict[str, Any] = {"reason": reason[-MAX_WORDS:]} if reason else {}
        for key, value in found.items():
            # JSON has no nan.
            is_number = not isinstance(value, float) or math.isfinite(value)
            said[key] = value if is_number else str(value)
        line = json.dumps({"name": name, "status": status, **said})
        with self.figures.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        print(line, flush=True)
