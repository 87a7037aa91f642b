import pytest
import torch
from torch.torch_version import TorchVersion

from hpc_tune.engine import compile as engine_compile
from hpc_tune.engine.compile import num_compile_workers, prepare_compiler
from hpc_tune.errors import ConfigError

GIB = 1 << 30


@pytest.mark.parametrize(
    ("threads", "host_bytes", "workers"),
    [
        (1, 512 * GIB, 1),
        (16, 512 * GIB, 16),
        # 32 workers on each of 8 ranks of a 64 GiB node would be 256 GiB: 8 GiB / 8 for each rank.
        (32, 8 * GIB, 1),
        (32, 64 * GIB, 8),
        (8, GIB, 1),
    ],
)
def test_compile_workers_are_capped_by_cores_and_memory(threads, host_bytes, workers):
    assert num_compile_workers(threads, host_bytes) == workers


def test_a_missing_compiler_is_one_clear_error(tmp_path, monkeypatch):
    from torch._inductor import cpp_builder

    def nothing(search):
        from torch._inductor.exc import InvalidCxxCompiler

        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "cpp_compiler_search", nothing)
    with pytest.raises(ConfigError, match="needs a C\\+\\+ compiler.*module load gcc"):
        prepare_compiler(tmp_path, 0, torch.device("cpu"), 1, GIB)


def test_a_cache_that_cannot_be_made_is_one_clear_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="run.compile_cache: .* cannot be made"):
        prepare_compiler(tmp_path / "file", 0, torch.device("cpu"), 1, GIB)


@pytest.mark.parametrize(
    ("version", "device", "dropout", "is_refused"),
    [
        ("2.13.0+cu130", "cuda", 0.05, True),
        ("2.13.0a0+12ab34cd.nv26.1", "cuda", 0.05, True),
        ("2.12.1+cu128", "cuda", 0.05, False),
        ("2.13.0+cu130", "cuda", 0.0, False),
        ("2.13.0+cpu", "cpu", 0.05, False),
    ],
)
def test_dropout_that_torch_compiles_wrongly_for_gpus_is_refused(
    tmp_path, monkeypatch, version, device, dropout, is_refused
):
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)

    def prepare():
        prepare_compiler(tmp_path, 0, torch.device(device), 1, GIB, dropout)

    if not is_refused:
        prepare()
        return
    with pytest.raises(
        ConfigError, match="tune.dropout=0.05 .* torch 2.13.0.*; set tune.dropout=0"
    ):
        prepare()


def test_on_a_cpu_it_says_that_little_may_be_gained(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(engine_compile.log, "propagate", True)
    prepare_compiler(tmp_path, 0, torch.device("cpu"), 1, GIB)
    assert "may gain nothing on CPUs: hpc_tune's own layers were as fast" in caplog.text


def test_the_ranks_of_a_node_share_a_folder_and_nodes_do_not(tmp_path, monkeypatch):
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")
    for node in (0, 0, 1):
        prepare_compiler(tmp_path, node, torch.device("cpu"), 1, GIB)
    assert sorted(p.name.split("-")[1] for p in tmp_path.iterdir()) == ["0", "1"]
    assert engine_compile.torch._inductor.config.compile_threads == 1
