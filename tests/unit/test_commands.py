import shutil
import subprocess

import pytest

from hpc_tune import cli
from hpc_tune.commands import COMMANDS, completion_script


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("words", "there", "absent"),
    [
        ("hpc_tune tr", ["train", "train.seed="], ["plan"]),
        ("hpc_tune --", ["--config", "--help", "--version"], ["train"]),
        ("hpc_tune plan optim.l", ["optim.lr="], ["optim.eps="]),
        ("hpc_tune tune.method = q", ["qlora"], ["lora"]),
        ("hpc_tune train train.compile =", ["true", "false"], []),
        ("hpc_tune data.chat_template = l", ["llama2", "llama3"], ["lora", "chatml"]),
        ("hpc_tune data.path = /et", ["/etc"], []),
        ("hpc_tune report /et", ["/etc"], ["train"]),
        ("hpc_tune show /et", ["/etc"], ["train"]),
        ("hpc_tune show --r", ["--rows"], ["--rank"]),
        ("hpc_tune plan --", ["--nodes", "--config", "--help"], ["--force", "--version"]),
        ("hpc_tune plan --save ''", ["streamed", "gathered"], ["optim.lr=", "--nodes"]),
        ("hpc_tune report --", ["--out"], ["--config"]),
        ("hpc_tune report o", [], ["optim.lr="]),
        ("hpc_tune --config /et", ["/etc"], ["train"]),
        ("hpc_tune completion ''", ["bash", "zsh"], ["optim.lr="]),
    ],
)
def test_bash_is_offered_what_can_stand_there(tmp_path, words, there, absent):
    (tmp_path / "script").write_text(completion_script("bash", COMMANDS))
    line = f". ./script; COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _hpc_tune"
    done = subprocess.run(
        ["bash", "-c", f'{line}; printf "%s\\n" "${{COMPREPLY[@]}}"'],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
    )
    offered = done.stdout.split()
    assert set(there) <= set(offered), done.stderr
    assert not set(absent) & set(offered)


def test_another_shell_is_refused(capsys):
    assert cli.main(["completion", "fish"]) == 2
    assert "invalid choice: 'fish' (choose from" in capsys.readouterr().err
