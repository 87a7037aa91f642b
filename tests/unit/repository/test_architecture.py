import ast
import functools
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3] / "hpc_tune"
sys.path.insert(0, str(ROOT.parent / "tools"))

from house_table import (  # noqa: E402
    MAX_LINES,
    MAX_PARAMETERS,
    circles_in,
    functions_in,
    imports_of,
    module_state,
    read,
)

# From the lowest layer to the highest; what is in one row must not know its neighbors.
LAYERS = (
    ("files",),
    ("errors", "units", "log", "faults", "safe_yaml", "packages"),
    ("startup_signals", "torch_versions", "hub_cache"),
    ("config",),
    ("cluster",),
    ("world", "batch"),
    ("memory", "data", "model", "probe"),
    ("rundir",),
    ("step", "trackers"),
    ("engine", "checkpoint"),
    ("plan",),
    ("autotune",),
    ("train",),
    ("supervise", "report", "generate", "convert", "prepare"),
    ("commands",),
    ("cli",),
    ("__main__",),
)
# The only places where a layer knows itself.
SAME_LAYER = {("log", "units"), ("probe", "memory")}
# Which files may import a third party, and do: a trailing slash means a whole package of ours.
OWNERS = {
    "mpi4py": ("world/",),
    "deepspeed": ("engine/zero/",),
    "h5py": ("data/",),
    "torch.distributed.fsdp": ("engine/fsdp.py", "torch_versions.py"),
    "transformers": ("model/",),
    "peft": ("model/adapters.py",),
    "safetensors": ("model/",),
    "bitsandbytes": ("model/quantized_base.py",),
    "torchao": ("engine/adamw_8bit.py", "model/float8.py"),
    "yaml": ("safe_yaml.py", "config/", "checkpoint/", "report/", "convert/"),
    "psutil": ("world/processes.py", "world/liveness.py", "world/rendezvous.py"),
    "matplotlib": ("report/",),
    "gguf": ("checkpoint/gguf_file.py",),
    "wandb": ("trackers.py",),
    "mlflow": ("trackers.py",),
    "trackio": ("trackers.py",),
    "amdsmi": ("probe/gpu_state.py",),
    "pynvml": ("probe/topology.py", "probe/gpu_state.py"),
}
LAYER_OF = {package: number for number, packages in enumerate(LAYERS) for package in packages}
FILES = sorted(ROOT.rglob("*.py"))


@functools.cache
def imports() -> dict[Path, set[str]]:
    """What each file imports."""
    return {file: imports_of(file) for file in FILES}


@functools.cache
def trees():
    return {path: ast.parse(text) for path, text in read(ROOT).items()}


@functools.cache
def functions():
    return functions_in(trees())


def package_of(file: Path) -> str:
    return file.relative_to(ROOT).with_suffix("").parts[0]


def edges() -> set[tuple[str, str, str]]:
    """(file, its package, the package it imports) over the whole package."""
    found = set()
    for file, names in imports().items():
        for name in names:
            top, *rest = name.split(".")
            if top == "hpc_tune" and rest and rest[0] != "__version__":
                found.add((str(file.relative_to(ROOT)), package_of(file), rest[0]))
    return found


def test_every_package_has_a_layer_and_every_layer_its_packages():
    assert {package_of(file) for file in FILES} - {"__init__"} == LAYER_OF.keys()


def test_a_package_imports_only_from_lower_layers():
    wrong = {
        edge
        for edge in edges()
        if edge[1] != edge[2]
        and LAYER_OF[edge[2]] >= LAYER_OF[edge[1]]
        and edge[1:] not in SAME_LAYER
    }
    assert not wrong


def test_the_exceptions_stay_in_one_layer_and_are_needed():
    assert all(LAYER_OF[a] == LAYER_OF[b] for a, b in SAME_LAYER)
    assert {edge[1:] for edge in edges()} >= SAME_LAYER


def test_the_check_sees_an_import_inside_a_function(tmp_path):
    file = tmp_path / "x.py"
    file.write_text("def f():\n    from hpc_tune.cli import main\n    import h5py._hl as x\n")
    assert imports_of(file) == {"hpc_tune.cli.main", "h5py._hl"}


def test_no_files_import_each_other_in_a_circle():
    assert circles_in(ROOT) == []


@pytest.mark.parametrize(
    ("last", "closes"),
    [
        ("from ours.a import f", True),
        ("import ours.a", True),
        ("from ours import a", True),
        ("def f():\n    from ours.a import f", True),
        ("if TYPE_CHECKING:\n    from ours.a import f", True),
        ("if typing.TYPE_CHECKING:\n    import ours.a", True),
        ("from theirs.a import f", False),
        ("", False),
    ],
)
def test_a_circle_of_three_files_is_found(tmp_path, last, closes):
    package = tmp_path / "ours"
    package.mkdir()
    texts = {"__init__": "", "a": "from ours.b import f", "b": "from ours import c", "c": last}
    for name, text in texts.items():
        (package / f"{name}.py").write_text(text)
    assert circles_in(package) == ([["ours.a", "ours.b", "ours.c"]] if closes else [])


def users_of(third_party: str) -> set[str]:
    return {
        str(file.relative_to(ROOT))
        for file, names in imports().items()
        for name in names
        if f"{name}.".startswith(f"{third_party}.")
    }


@pytest.mark.parametrize("third_party", OWNERS)
def test_a_third_party_is_imported_only_by_its_owner(third_party):
    assert not {user for user in users_of(third_party) if not user.startswith(OWNERS[third_party])}


@pytest.mark.parametrize("third_party", OWNERS)
def test_every_owner_imports_what_it_owns(third_party):
    users = users_of(third_party)
    assert [o for o in OWNERS[third_party] if not any(u.startswith(o) for u in users)] == []


@pytest.mark.parametrize(
    ("decision", "owner"),
    [
        ("= choose_layout(", "plan/resolve.py"),
        ("-global_rows // ", "step/layout.py"),
        ("2 * (num_ranks - 1)", "step/layout.py"),
        ("balance_stages(", "step/layout.py"),
        ("self.size.trained_itemsize", "step/plan.py"),
        ("989e12", "plan/hardware.py"),
        ("% num_needed == 0", "config/parallel.py"),
        ("env=environ_without_launcher()", "cluster/launchers.py"),
    ],
)
def test_a_decision_is_made_in_one_file(decision, owner):
    files = [f for f in FILES if decision in f.read_text(encoding="utf-8")]
    assert [str(file.relative_to(ROOT)) for file in files] == [owner]


def test_psutil_is_not_asked_for_the_memory_of_the_machine():
    """A job may use what its cgroup grants: memory/host.py."""
    files = [*FILES, *(ROOT.parent / "tools").glob("*.py")]
    assert not [file for file in files if "virtual_memory" in file.read_text(encoding="utf-8")]


def test_variables_of_launchers_and_schedulers_are_named_in_cluster_alone():
    variable = re.compile(r"\b(SLURM|PBS|OMPI|PRTE|PMIX?|MV2|PALS|FLUX|JSM|TORCHELASTIC)_[A-Z]")
    users = {
        package_of(file) for file in FILES if variable.search(file.read_text(encoding="utf-8"))
    }
    assert users == {"cluster"}


def test_init_files_of_packages_are_empty():
    assert not [f for f in ROOT.glob("*/**/__init__.py") if f.read_text().strip()]


def test_no_file_is_over_600_lines():
    assert not {f: n for f in FILES if (n := len(f.read_text().splitlines())) > 600}


# What layers must know of the micro-batch, and the log: the documented seams.
MODULE_STATE = ["log.py log", "model/micro_batch.py batch_context"]
MAX_TAKERS = 15


def test_no_function_is_over_60_lines():
    assert not [f for f in functions() if f.num_lines > MAX_LINES]


def test_no_function_has_more_than_8_parameters():
    assert not [f for f in functions() if f.num_parameters > MAX_PARAMETERS]


def test_few_functions_at_the_top_take_the_whole_configuration():
    takers = [f"{f.file} {f.name}" for f in functions() if f.takes_config]
    assert len(takers) < MAX_TAKERS, takers


def test_state_of_a_module_is_one_of_the_documented_seams():
    assert module_state(trees()) == MODULE_STATE


def test_input_is_refused_by_errors_and_not_by_asserts():
    kinds = Counter(type(node) for tree in trees().values() for node in ast.walk(tree))
    assert 10 * kinds[ast.Assert] < kinds[ast.Raise]


HEAVY = ("torch", "transformers", "peft", "numpy", "h5py", "mpi4py", "psutil")
ENTRY = """
import runpy, sys
sys.argv = ["hpc_tune", *{arguments!r}]
code = None
try:
    runpy.run_module("hpc_tune", run_name="__main__", alter_sys=True)
except SystemExit as end:
    code = end.code
print("CODE", code, [name for name in {heavy!r} if name in sys.modules])
"""


def test_a_python_that_is_too_old_is_told_so_before_anything_is_imported():
    """It could not even read the other files; this one it can: no newer syntax is in it."""
    program = "import sys, runpy; sys.version_info = (3, 6, 8, 'final', 0); "
    program += "runpy.run_module('hpc_tune', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT.parent, timeout=60
    )
    assert done.returncode == 2
    assert "this is Python 3.6 at" in done.stderr
    assert "expected 3.11 or newer" in done.stderr
    ast.parse((ROOT / "__main__.py").read_text(), feature_version=(3, 6))


def test_a_python_without_the_dependencies_is_told_so():
    """As in a shell where the environment is not activated; -S leaves out what pip installed."""
    done = subprocess.run(
        [sys.executable, "-E", "-S", "-m", "hpc_tune"],
        capture_output=True,
        text=True,
        cwd=ROOT.parent,
        timeout=60,
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert f"the Python at {sys.executable} has no module " in done.stderr
    assert "activate that environment" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--help"], 0, "train.max_steps"),
        (["train", "--help"], 0, "--config"),
        (["train.max_stepz=3"], 2, "train.max_steps"),
        (["--config", "nowhere.yaml"], 2, "no such file"),
        (["--cofnig", "x"], 2, "unknown argument --cofnig; did you mean --config?"),
        (["inspect", "x", "--verfiy"], 2, "unknown argument --verfiy; did you mean --verify?"),
        (["export", "--run", "x", "--to", "merged"], 2, "RUN is given without a name"),
        (["inspect", "--verify"], 2, "the following arguments are required: RUN; see python"),
        (["plan", "--nodes", "zwei"], 2, "--nodes: found zwei, expected a whole number"),
        (["doctor", "--links", "5s"], 2, "--links: found 5s, expected a number"),
        (["--version"], 0, "platform"),
        (["convert", "nowhere.yaml"], 2, "nowhere.yaml: no such file"),
        (["convert", "pyproject.toml"], 2, "not YAML"),
        (["completion", "bash"], 0, 'tune.method=") '),
        (["trian"], 2, "did you mean train"),
        (["my.yaml"], 2, "pass a settings file by --config my.yaml"),
        (["plan", "--device-memory", "80"], 2, "--device-memory: 80 is 80 bytes of memory"),
        (
            ["generate", "--run", "x", "--prompt", "y", "--max-tokens", "0"],
            2,
            "--max-tokens: found 0, expected",
        ),
    ],
)
def test_help_and_mistakes_answer_without_importing_torch(arguments, code, said):
    done = entered(arguments)
    assert done.stdout.splitlines()[-1] == f"CODE {code} []", done.stderr
    assert said in done.stdout + done.stderr


@pytest.mark.soak
@pytest.mark.parametrize("arguments", [["--help"], ["train.max_stepz=3"], ["--version"]])
def test_help_and_mistakes_answer_in_a_second(arguments):
    times_s = []
    for _ in range(3):
        began_s = time.monotonic()
        entered(arguments)
        times_s.append(time.monotonic() - began_s)
    assert min(times_s) < 1.0


def entered(arguments):
    """Run ``python -m hpc_tune`` with arguments; it says at its end what is imported."""
    return subprocess.run(
        [sys.executable, "-c", ENTRY.format(arguments=arguments, heavy=HEAVY)],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=ROOT.parent,
    )
