"""What --version says for a bug report."""

import subprocess

from hpc_tune.probe import software
from hpc_tune.probe.software import _gpu_names, bug_report_lines, git_commit


def test_the_models_of_gpus_are_read_from_the_drivers_folder(tmp_path):
    for number, name in enumerate(["NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB"]):
        (tmp_path / f"0000:0{number}:00.0").mkdir()
        text = f"Model: \t\t {name}\nIRQ:   \t\t 42\nGPU UUID: \t ?\n"
        (tmp_path / f"0000:0{number}:00.0" / "information").write_text(text)
    assert list(_gpu_names(tmp_path)) == ["NVIDIA A100-SXM4-40GB"] * 2
    assert list(_gpu_names(tmp_path / "none")) == []


def test_a_clone_is_named_by_its_commit_and_an_installed_package_is_not(tmp_path, monkeypatch):
    assert git_commit(tmp_path) is None
    for words in (["init"], ["-c", "user.name=a", "-c", "user.email=b", "commit", "-m", "c"]):
        options = ["--allow-empty"] if "commit" in words else []
        command = ["git", *words, "-q", *options]
        subprocess.run(command, cwd=tmp_path, check=True)
    monkeypatch.setattr(software, "__file__", str(tmp_path / "hpc_tune" / "probe" / "software.py"))
    assert f"commit {git_commit(tmp_path)}" in bug_report_lines()
    elsewhere = tmp_path / "venv" / "hpc_tune" / "probe" / "software.py"
    elsewhere.parent.mkdir(parents=True)
    monkeypatch.setattr(software, "__file__", str(elsewhere))
    assert not [line for line in bug_report_lines() if line.startswith("commit ")]
