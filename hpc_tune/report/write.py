"""The report command: run directories -> report.html, and its figures as PNG where asked for."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hpc_tune.atomic_file import write_file
from hpc_tune.errors import ConfigError
from hpc_tune.report.figures import draw_figures, render_svgs
from hpc_tune.report.job_energy import find_jobs_energy
from hpc_tune.report.page import render_page
from hpc_tune.report.read import read_run

REPORT_FILE, REPORT_FOLDER = "report.html", "report"
_DPI = 144


def write_report(
    paths: Sequence[Path], out: Path | None = None, png: bool = False, asks: bool = True
) -> Path:
    """Write one report of one or several runs; return its path.

    ``out`` is an .html file; by default report.html of the only run, or in the current folder.
    ``png``: the figures too, into ``report/`` beside it. ``asks``: ask the scheduler for the energy
    of the runs' jobs.

    Raises:
        ConfigError: if a path is no run directory, or the report cannot be written.
    """
    read = (read_run(path) for path in paths)
    runs = [replace(run, jobs_energy=find_jobs_energy(run.events, asks)) for run in read]
    out = out or ((runs[0].path if len(runs) == 1 else Path()) / REPORT_FILE)
    figures = list(draw_figures(runs))
    try:
        folder = out.parent / (REPORT_FOLDER if out.name == REPORT_FILE else out.stem)
        if png:
            folder.mkdir(parents=True, exist_ok=True)
            for name, _, figure in figures:
                figure.savefig(folder / f"{name}.png", dpi=_DPI)
        out.parent.mkdir(parents=True, exist_ok=True)
        write_file(out, render_page(runs, render_svgs(figures)))
    except OSError as error:
        raise ConfigError(
            f"{out} cannot be written: {error.strerror or error}; name another file with --out"
        ) from None
    return out
