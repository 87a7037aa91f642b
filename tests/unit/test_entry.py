"""What is true of every command: signals while Python imports, streams, packages."""

import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_tune import __main__ as entry
from hpc_tune import packages
from hpc_tune.packages import (
    explain_import_failure,
    hidden_torch_warning,
    shadowing_package_warnings,
)

ROOT = Path(__file__).parents[2]
SLOW = "import sys, time\nprint('importing', file=sys.stderr, flush=True)\ntime.sleep(60)\n"


@pytest.fixture
def site(tmp_path):
    """A function that puts a package in front of the installed ones."""

    def put(name, text="", version=None):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
        if version is not None:
            (tmp_path / f"{name}-{version}.dist-info").mkdir()
        return tmp_path

    return put


def command(*words, folder=ROOT, stdout=subprocess.PIPE, **variables):
    env = os.environ | {"PYTHONPATH": f"{folder}:{ROOT}"} | variables
    return subprocess.Popen(
        [sys.executable, "-m", "hpc_tune", *words],
        env=env,
        cwd=ROOT,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
    )


def importing(site, *words, ignored=None):
    """Start a command that imports for a minute."""
    if ignored is not None:
        before = signal.signal(ignored, signal.SIG_IGN)
    process = command(*words, folder=site("pydantic", SLOW))
    if ignored is not None:
        signal.signal(ignored, before)
    assert process.stderr.readline() == "importing\n"
    return process


def ended(process):
    _, said = process.communicate(timeout=60)
    return process.returncode, said


@pytest.mark.parametrize(
    ("name", "code"),
    [("SIGUSR1", 75), ("SIGUSR2", 75), ("SIGTERM", 75), ("SIGHUP", 75), ("SIGINT", 130)],
)
def test_a_run_obeys_signals_while_it_still_imports(site, name, code):
    process = importing(site, "train.max_steps=3")
    process.send_signal(getattr(signal, name))
    again = "Rerun the same command to resume"
    assert ended(process) == (code, f"{name}: stopped immediately. {again}\n")


def test_under_nohup_a_hangup_stays_ignored(site):
    process = importing(site, "train", ignored=signal.SIGHUP)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGUSR1)
    code, said = ended(process)
    assert code == 75
    assert said.startswith("SIGUSR1: ")


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", -15), ("SIGINT", 130)])
def test_a_command_that_keeps_nothing_ends_by_signals_as_programs_do(site, name, code):
    process = importing(site, "inspect", "runs/a")
    process.send_signal(getattr(signal, name))
    assert ended(process) == (code, "")


def test_a_reader_that_has_enough_is_no_error():
    process = command("completion", "bash", stdout=subprocess.PIPE)
    process.stdout.close()
    process.stdout = None
    assert ended(process) == (141, "")


@pytest.mark.parametrize("buffered", ["", "1"])
def test_a_full_disk_below_stdout_is_one_line(buffered):
    with open("/dev/full", "w") as full:
        process = command("completion", "bash", stdout=full, PYTHONUNBUFFERED=buffered)
        code, said = ended(process)
    assert code == 1
    assert said == "hpc_tune: cannot write to stdout: No space left on device\n"


def test_a_file_that_cannot_be_read_is_one_line(monkeypatch, capfd):
    def refuse():
        raise PermissionError(errno.EACCES, "Permission denied", "runs/a/metrics.jsonl")

    monkeypatch.setattr("hpc_tune.cli.main", refuse)
    monkeypatch.setattr(sys, "argv", ["hpc_tune", "watch"])
    assert entry.main() == 2, "a mistake of the user's, or of whoever's file it is"
    assert capfd.readouterr().err == "hpc_tune: runs/a/metrics.jsonl: Permission denied\n"


@pytest.mark.parametrize("encoding", ["ascii", pytest.param("latin-1", marks=pytest.mark.full)])
def test_what_stdout_cannot_show_is_printed_by_its_number(tmp_path, encoding):
    words = ["init", "--model", "builtin:tiny", "--data", "Köln→日.jsonl", "--machine", "cpu"]
    words += ["--method", "lora", "--out", f"{tmp_path}/mine.yaml"]
    process = command(*words, PYTHONIOENCODING=encoding)
    said = process.stdout.buffer.read().decode(encoding)
    assert ended(process) == (0, "")
    assert "ln\\u2192\\u65e5.jsonl" in said


def test_text_that_the_shells_locale_cannot_read_is_told_with_what_helps():
    process = command(
        "show", "x", "run.notes=ö", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", LC_ALL="C"
    )
    code, said = ended(process)
    assert code == 2
    assert "export LC_ALL=C.UTF-8" in said


def test_a_package_of_another_version_in_pythonpath_is_named(site):
    folder = site("pydantic", "__version__ = '1.10.2'", "1.10.2")
    code, said = ended(command("inspect", "x", folder=folder))
    assert code == 2
    assert said.startswith(f"hpc_tune: pydantic 1.10.2 in {folder} cannot be used: cannot import ")
    assert said.endswith(
        f"; expected pydantic>=2.7. Unset PYTHONPATH, or take {folder} out of it\n"
    )


def test_one_that_fails_in_its_own_way_is_named_too(site):
    folder = site("yaml", "raise RuntimeError('built for another Python')")
    code, said = ended(command("inspect", "x", folder=folder))
    assert code == 2
    assert f"hpc_tune: yaml in {folder} cannot be used: built for another Python" in said
    assert said.count("\n") == 1


def test_one_that_can_be_imported_is_warned_of(site):
    folder = site("transformers", "", "4.30.1")
    site("numpy", "", "2.1.0")
    (warning,) = shadowing_package_warnings({"PYTHONPATH": f"/nowhere:{folder}"})
    assert warning.startswith(f"PYTHONPATH has transformers 4.30.1 in {folder}, in front of")
    assert "expected transformers" in warning
    assert shadowing_package_warnings({}) == []


def test_a_library_that_cannot_be_mapped_is_told_with_the_limit_and_no_version(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (3 << 30, resource.RLIM_INFINITY))
    with pytest.raises(ImportError) as raised:
        raise ImportError("lib.so: failed to map segment from shared object", name="torch")
    said = explain_import_failure(raised.value)
    assert "ulimit -v, or the batch system, limits this process to 3072 MiB of address" in said
    assert "Install the versions" not in said


@pytest.mark.parametrize(
    ("module", "package"),
    [("matplotlib", "matplotlib"), ("pynvml", "nvidia-ml-py"), ("rich", "rich")],
)
def test_one_that_is_not_installed_is_named_with_its_install_line(module, package, monkeypatch):
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(ModuleNotFoundError) as raised:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)
    said = explain_import_failure(raised.value)
    assert said.startswith(f"{package} is needed for this and is not installed: {sys.executable}")
    assert f"-m pip install '{package}>=" in said


def test_a_torch_behind_the_one_that_is_imported_is_told(tmp_path, monkeypatch):
    assert hidden_torch_warning() is None
    info = tmp_path / "torch-2.10.0+rocm7.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.10.0+rocm7.0\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert (
        f" hides torch 2.10.0+rocm7.0 in {tmp_path}: if that is your center's"
        in hidden_torch_warning()
    )


def test_an_error_of_our_own_is_no_package():
    for error in (ValueError("x"), ImportError("no f in it", name="hpc_tune.cli"), OSError("x")):
        with pytest.raises(type(error)) as raised:
            raise error
        assert explain_import_failure(raised.value) is None


@pytest.mark.parametrize(
    ("version", "needs", "is_within"),
    [
        ("2.11.0", ">=2.11,<2.14", True),
        ("2.13.1+cu128", "<2.14,>=2.11", True),
        ("2.14", "<2.14,>=2.11", False),
        ("2.9.1", ">=2.11,<2.14", False),
        ("1", "", True),
    ],
)
def test_versions_are_compared_as_numbers(version, needs, is_within):
    assert packages._is_in_range(version, needs) == is_within
