"""The README and each page of docs/ are followed to the letter, in a fresh copy of the repository.

Every command must parse and its settings validate, also where it needs a GPU or a cluster; the
others are run, and print what the page shows.
"""

import os
import shutil
import sys
from pathlib import Path

import pytest

from hpc_tune.memory.host import find_host_limit
from tests.support.docs import (
    DOCS,
    REASONS,
    broken_links,
    commands_of,
    files_of,
    missing_lines,
    outputs_of,
    pages,
    problems_of,
    script_of,
    unknown_settings,
)
from tests.support.ranks import ROOT, find_mpirun, rank_environment, run_ranks

PAGE_S = 580.0  # ends a page that hangs
COPIED = ("configs", "docs", "hpc_tune", "pbs", "slurm", "tests", "tools")
MODEL = "models/smollm2-135m-instruct"
PAGES = pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A folder that has what a clone has, to be written into, and the fetched model if any."""
    folder = tmp_path / "hpc_tune"
    folder.mkdir()
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name)
    for file in ROOT.glob("[A-Za-z]*.*"):
        if file.is_file():
            shutil.copy2(file, folder)
    if (ROOT / MODEL).is_dir():
        (folder / MODEL).parent.mkdir()
        (folder / MODEL).symlink_to(ROOT / MODEL)
    monkeypatch.setenv("SCRATCH", str(folder / "scratch"))
    monkeypatch.chdir(folder)
    return folder


def environment(text):
    """What a reader has who has installed hpc_tune, and mpirun where the page uses it."""
    folders = [Path(sys.executable).parent]
    folders += [Path(find_mpirun()).parent] if "mpirun" in text else []
    path = os.pathsep.join([*map(str, folders), os.environ["PATH"]])
    return rank_environment(2, {"PATH": path})


QUICK = ("coming-from", "extending", "pbs")
SHORT = ("data", "mixtures", "mixtures-of-experts", "report", "resume", "slurm")


def marks_of(page):
    """The long pages are followed by make soak: together they take minutes."""
    if page.stem in QUICK:
        return ()
    return pytest.mark.full if page.stem in SHORT else pytest.mark.soak


def followed():
    """The pages that have a command which is run."""
    runnable = [p for p in pages() if any(c.not_run is None for c in commands_of(p))]
    return [pytest.param(page, marks=marks_of(page), id=page.stem) for page in runnable]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", followed())
def test_what_a_page_says_can_be_typed(page, clone):
    run = [command for command in commands_of(page) if command.not_run is None]
    script = script_of(run)
    if MODEL in script and not (clone / MODEL).is_dir():
        pytest.skip(f"{MODEL} is not there: python tools/fetch_smollm2.py {MODEL}")
    if "host_limit:" in script and find_host_limit().cgroup is not None:
        pytest.skip("in this memory cgroup all else counts against the page's limit, too")
    (clone.parent / "page.sh").write_text(script)
    argv = ["bash", "-e", str(clone.parent / "page.sh")]
    done = run_ranks(argv, environment(script), PAGE_S, cwd=clone)
    printed = outputs_of(done.stdout)
    assert done.returncode == 0, f"{run[len(printed) - 1].place}: {printed[-1]}{done.stderr}"
    for command, came in zip(run, printed, strict=True):
        assert missing_lines(command.shown, came) == [], f"{command.place}: {command.text}\n{came}"


@PAGES
def test_every_command_of_a_page_is_understood(page, clone):
    commands = commands_of(page)
    for name, text in files_of(commands).items():
        (clone / name).parent.mkdir(exist_ok=True)
        (clone / name).write_text(text)
    for command in commands:
        assert problems_of(command.text, clone, os.environ) == [], command.place


@PAGES
def test_what_a_page_names_exists(page):
    assert broken_links(page) == []
    assert unknown_settings(page.read_text()) == []
    assert {command.not_run for command in commands_of(page)} <= {None, *REASONS}


def test_the_list_of_pages_has_all_of_them():
    index = (ROOT / "docs" / "index.md").read_text()
    names = [page.name for page in DOCS.glob("*.md") if page.name != "index.md"]
    assert [name for name in names if f"]({name})" not in index] == []


PAGE = """\
# A page

```bash
cat > a.yaml <<'END'
train: {max_steps: 3}
END
```

<!-- not run: needs a GPU -->
```console
$ python -m hpc_tune \\
    --config a.yaml
...
done after 3 steps
$ echo two
two
```
"""


def test_the_commands_of_a_page_are_found_with_what_it_shows(tmp_path):
    (tmp_path / "page.md").write_text(PAGE)
    first, second, third = commands_of(tmp_path / "page.md")
    assert files_of([first]) == {"a.yaml": "train: {max_steps: 3}\n"}
    assert (first.not_run, first.place) == (None, "page.md:4")
    assert second.text == "python -m hpc_tune \\\n    --config a.yaml"
    assert second.shown == ("...", "done after 3 steps")
    assert (third.text, third.shown, third.not_run) == ("echo two", ("two",), "needs a GPU")
    (tmp_path / "page.md").write_text(PAGE.replace("```console", "\n```console"))
    with pytest.raises(ValueError, match="page.md:10: a mark stands right above its block"):
        commands_of(tmp_path / "page.md")


@pytest.mark.parametrize(
    ("shown", "missing"),
    [
        ("world  1 rank\n...\ndone after 7 steps in 1.5 GiB", []),
        ("...\nstep ... loss 3", []),
        ("world 1 rank\ndone after 7 steps", ["done after 7 steps"]),  # a step is between
        ("...\nstep 1 of 2 ...\n...\nworld 1 rank", ["world 1 rank"]),  # another order
        ("...\nstep 2", ["step 2"]),  # half a line
    ],
)
def test_shown_output_must_come_but_for_its_numbers(shown, missing):
    printed = "world   4 rank\nstep 1 of 2  loss 2.5\ndone after 40 steps in 320 MiB\n"
    assert missing_lines(shown.splitlines(), printed) == missing


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("mpirun -np 8 python -m hpc_tune train.max_steps=2", None),
        ("python -m hpc_tune trian.max_steps=2", "trian.max_steps: no such key"),
        ("python -m hpc_tune inspect runs/a --verify | head -n 1", None),
        ("python -m hpc_tune inspect runs/a --verfiy", "unknown argument --verfiy"),
        ("srun python -m hpc_tune plan optim.lr=fast || true", "optim.lr='fast'"),
        ("python -m hpc_tune --config nowhere.yaml", "nowhere.yaml: no such file"),
        ("sbatch --nodes=4 slurm/tiny_cpu.sh optim.lr=1e-3", None),
        ("sbatch slurm/70b_lora.sh optim.rate=1e-3", "optim.rate: no such key"),
        ("python tools/nothing.py", "tools/nothing.py: no such file"),
        ("make soup", "make soup: no such target"),
    ],
)
def test_what_a_command_gets_wrong_is_found_without_running_it(command, said, clone):
    found = problems_of(command, clone, os.environ)
    assert (not found) if said is None else said in found[0]


def test_settings_and_options_that_do_not_exist_are_found_in_the_text():
    text = "`data.path` `data/train.jsonl` `data.paht=1` `inspect RUN --verify` `inspect --all`"
    assert unknown_settings(text) == ["data.paht", "inspect --all"]
