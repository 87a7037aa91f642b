"""docs/sites.md, a page for each centre, and packaging/: what they say is what hpc_tune takes."""

import ast
import re
import shlex
import subprocess
import sys

import pytest
import yaml

from hpc_tune import cli
from hpc_tune.config.load import load_config
from tests.support.docs import DOCS, commands_of, files_of
from tests.support.ranks import ROOT

PAGES = sorted((DOCS / "sites").glob("*.md"))
PACKAGING = ROOT / "packaging"
JOBS = {
    (page.stem, name): text
    for page in PAGES
    for name, text in files_of(commands_of(page)).items()
    if name.endswith(".yaml")
}
SLINGSHOT = {"lumi", "frontier", "alps", "perlmutter", "polaris"}
# What pages may name, by who reads it. A name that is not here is a slip, or belongs here.
READ_BY = {
    "NCCL and RCCL": "NCCL_NET NCCL_NET_PLUGIN NCCL_NET_GDR_LEVEL NCCL_CROSS_NIC NCCL_PROTO "
    "NCCL_COLLNET_ENABLE NCCL_SOCKET_IFNAME",
    "libfabric": "FI_CXI_DEFAULT_CQ_SIZE FI_CXI_DEFAULT_TX_SIZE FI_CXI_DISABLE_HOST_REGISTER "
    "FI_CXI_RX_MATCH_MODE FI_MR_CACHE_MONITOR FI_CXI_RDZV_PROTO FI_CXI_RDZV_GET_MIN "
    "FI_CXI_RDZV_THRESHOLD FI_CXI_RDZV_EAGER_SIZE",
    "Cray MPICH": "MPICH_GPU_SUPPORT_ENABLED",
    "MIOpen": "MIOPEN_USER_DB_PATH MIOPEN_CUSTOM_CACHE_DIR",
    "HDF5": "HDF5_USE_FILE_LOCKING",
    "Level Zero": "ZE_FLAT_DEVICE_HIERARCHY",
    "Singularity": "SINGULARITYENV_PREPEND_PATH",
    "the loader and the shell": "LD_LIBRARY_PATH PATH SIF",
}
KNOWN = {name for names in READ_BY.values() for name in names.split()}
_ASSIGNED = re.compile(r"(?:^|[\s`])([A-Z][A-Z0-9_]+)=")
_NAMED = re.compile(r"`((?:NCCL|FI|MIOPEN|MPICH|ZE|HDF5)_[A-Z0-9_]+)")


def variables_in(text):
    """Return the variables that a page sets or names; what a placeholder stands for is none."""
    return ({*_ASSIGNED.findall(text)} | {*_NAMED.findall(text)}) - {"SCRATCH", "HPC_TUNE_VENV"}


def test_each_page_is_in_the_index_and_each_machine_with_gpus_that_run_has_a_job():
    index = (DOCS / "sites.md").read_text()
    assert sorted(re.findall(r"\]\(sites/(\w+)\.md\)", index)) == [page.stem for page in PAGES]
    assert {page.stem for page in PAGES} - {site for site, _ in JOBS} == {"aurora"}


@pytest.mark.parametrize(("site", "name"), JOBS, ids=str)
def test_a_job_of_a_page_becomes_a_script_with_all_that_it_asks_for(
    site, name, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(JOBS[site, name])
    sections = yaml.safe_load(JOBS[site, name])
    assert cli.main(["submit", "--config", name, "--dry-run"]) == 0
    script = capsys.readouterr().out
    assert script.splitlines()[-1].endswith(f"--config {name}")
    if "pbs" in sections:
        check_pbs(sections["pbs"], script)
        return
    asked = sections["slurm"]
    options = re.findall(r"^#SBATCH (\S+)$", script, re.MULTILINE)
    for field, option in (
        *(("account", "--account"), ("partition", "--partition"), ("qos", "--qos")),
        *(("nodes", "--nodes"), ("gpus_per_node", "--ntasks-per-node"), ("memory", "--mem")),
        *(("cpus_per_task", "--cpus-per-task"), ("time", "--time")),
    ):
        assert field not in asked or f"{option}={asked[field]}" in options
    assert {*asked.get("options", [])} <= {*options}
    gpus = [option for option in options if re.match(r"--(gpus-per-node|gres=gpu)\b", option)]
    assert len(gpus) == 1, "GPUs are asked for once, in the words of the centre"
    assert ("module load " + " ".join(asked.get("modules", ["-"])) in script) == (
        "modules" in asked
    )
    assert asked.get("container", "srun") in script


def check_pbs(asked, script):
    """Check that a script for PBS asks for all that a section does."""
    lines = re.findall(r"^#PBS (.+)$", script, re.MULTILINE)
    for field, option in (
        *(("account", "-A "), ("queue", "-q "), ("walltime", "-l walltime=")),
        ("filesystems", "-l filesystems="),
    ):
        assert f"{option}{asked[field]}" in lines
    nodes, ranks = asked["nodes"], asked["gpus_per_node"]
    chunk = f"ncpus={ranks * asked['cpus_per_task']}:mpiprocs={ranks}:ngpus={ranks}"
    assert f"-l select={nodes}:{chunk}" in lines
    assert f"mpiexec -n {nodes * ranks} --ppn {ranks}" in script


@pytest.mark.parametrize(("site", "name"), JOBS, ids=str)
def test_a_first_job_is_short_and_the_files_it_needs_are_on_its_page(site, name, tmp_path):
    (tmp_path / name).write_text(JOBS[site, name])
    config = load_config(str(tmp_path / name))
    assert config.job.time_limit_s <= 1800
    assert config.job.nodes == 2
    assert config.batch.global_size % (2 * config.job.ranks_per_node) == 0
    files = files_of(commands_of(DOCS / "sites" / f"{site}.md"))
    assert config.job.env_file is None or config.job.env_file in files
    for script in {*files} - {name}:
        done = subprocess.run(["bash", "-n"], input=files[script], text=True, timeout=20)
        assert done.returncode == 0, script


@pytest.mark.parametrize("page", [DOCS / "sites.md", *PAGES], ids=lambda page: page.stem)
def test_a_page_names_variables_that_are_known(page):
    text = page.read_text()
    assert variables_in(text) - KNOWN == set()
    if page.stem in SLINGSHOT:  # without it NCCL would send by TCP, and say nothing
        assert variables_in(text) & {"NCCL_NET", "NCCL_NET_GDR_LEVEL"}


def test_each_known_variable_is_named_and_a_slip_is_found():
    named = {n for page in [DOCS / "sites.md", *PAGES] for n in variables_in(page.read_text())}
    assert KNOWN - named == set()
    assert variables_in("export NCLL_NET=x A_B=2\nset `FI_CXI_CQ`") == {
        "NCLL_NET",
        "A_B",
        "FI_CXI_CQ",
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_names_its_sources_and_says_what_does_not_work(page):
    text = page.read_text()
    sources = text[text.index("\nSources") :]
    assert re.search(r"\]\(https://[^)]+\)", sources)
    assert re.search(r"\b20\d\d\b", sources)
    assert "## What does not work" in text or "not supported" in text
    assert len(text.splitlines()) <= 70


BARE = """
import sys
sys.modules.update(dict.fromkeys(("torch", "transformers", "numpy", "peft", "pyarrow", "h5py")))
from hpc_tune import cli
sys.exit(cli.main(sys.argv[1:]))
"""


def test_submit_needs_no_more_on_the_host_than_the_pages_install_there(tmp_path):
    """Where the ranks run in a container. None in sys.modules: an import of it fails."""
    (tmp_path / "a.yaml").write_text(JOBS["lumi", "lumi.yaml"])
    argv = [sys.executable, "-c", BARE, "submit", "--config", "a.yaml", "--dry-run"]
    environ = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        argv, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert "singularity run -B" in done.stdout


def sections_of(definition):
    """Return the sections of a definition of a container by name, its header as the first."""
    parts = re.split(r"^%(\w+)\n", definition, flags=re.MULTILINE)
    return dict(zip(["header", *parts[1::2]], parts[::2], strict=True))


@pytest.mark.parametrize("file", sorted(PACKAGING.rglob("*.def")), ids=lambda file: file.stem)
def test_a_container_is_made_of_files_that_exist_by_commands_that_do(file):
    sections = sections_of(file.read_text())
    header = re.findall(r"^(\w+): (.+)$", sections["header"], re.MULTILINE)
    assert [name for name, _ in header] == ["Bootstrap", "From"]
    given = dict(re.findall(r"^\s+(\w+)=(\S+)$", sections["arguments"], re.MULTILINE))
    assert {*re.findall(r"\{\{ (\w+) \}\}", sections["header"])} == {*given}
    copied = dict(line.split() for line in sections["files"].splitlines() if line.strip())
    assert [name for name in copied if not (ROOT / name).exists()] == []
    done = subprocess.run(["bash", "-n"], input=sections["post"], text=True, timeout=20)
    assert done.returncode == 0
    used = re.findall(r"/opt/src/[\w./-]+", sections["post"])
    assert used
    assert {*used} <= {*copied.values()}
    # What setup.py, and tools/install.py from it, reads besides itself.
    assert {"setup.py", "pyproject.toml", "README.md", "hpc_tune"} <= {*copied}


def test_the_container_over_another_keeps_its_torch():
    post = sections_of((PACKAGING / "apptainer" / "hpc_tune.def").read_text())["post"]
    commands = [shlex.split(line) for line in post.splitlines() if line.strip()]
    [install] = [words for words in commands if "python" in words[0] or "pip" in words]
    assert install[:2] == ["python3", "/opt/src/tools/install.py"]


def requirements():
    """Return what setup.py asks for: the least version by name."""
    call = ast.walk(ast.parse((ROOT / "setup.py").read_text()))
    given = next(
        n.value for n in call if isinstance(n, ast.keyword) and n.arg == "install_requires"
    )
    return dict(text.split(",")[0].split(">=") for text in ast.literal_eval(given))


def test_each_package_asks_for_what_setup_does():
    wanted = {name: least for name, least in requirements().items() if name != "deepspeed"}
    conda = yaml.safe_load((PACKAGING / "conda" / "environment.yml").read_text())["dependencies"]
    theirs = {"pytorch": "torch", "matplotlib-base": "matplotlib"}
    found = dict(re.split(r" >=|,", line)[:2] for line in conda if ">=" in line)
    found = {theirs.get(name, name): least for name, least in found.items()}
    assert found.pop("python") == "3.11"
    assert found == wanted
    spack = (PACKAGING / "spack" / "package.py").read_text()
    found = dict(re.findall(r'depends_on\("py-([\w-]+)@([\d.]+):', spack))
    assert found.pop("setuptools")
    assert found == wanted


def test_the_easyconfig_has_what_setup_asks_for_and_the_version_of_this_hpc_tune():
    [file] = (PACKAGING / "easybuild").glob("*.eb")
    # Its constants and templates; a constant of EasyBuild stands for itself.
    known = {"SYSTEM": "SYSTEM", "ARCH": "x86_64"}
    exec(compile(file.read_text(), str(file), "exec"), known)
    version = known["version"]
    assert f'__version__ = "{version}"' in (ROOT / "hpc_tune" / "__init__.py").read_text()
    suffix = known["versionsuffix"].replace("%(cudaver)s", "12.6.0")
    toolchain = "-".join(known["toolchain"][part] for part in ("name", "version"))
    assert file.name == f"{known['name']}-{version}-{toolchain}{suffix}.eb"
    has = {name.lower(): number for name, number, *_ in known["dependencies"]}
    # Of bundles: SciPy-bundle 2024.05, Python-bundle-PyPI 2024.06, and PyTorch by another name.
    has |= {"numpy": "1.26.4", "jinja2": "3.1.4", "psutil": "5.9.8", "torch": has["pytorch"]}
    has |= {name.lower(): number for name, number, _ in known["exts_list"]}
    for name, least in requirements().items():
        if name != "deepspeed":
            parts = [[*map(int, text.split("."))] for text in (has[name], least)]
            assert parts[0] >= parts[1], name
    names = [name for name, *_ in known["exts_list"]]
    assert names.index("transformers") < names.index("peft") < names.index(known["name"])
    unverified = [name for name, _, more in known["exts_list"] if not more.get("checksums")]
    assert unverified == [known["name"]]
