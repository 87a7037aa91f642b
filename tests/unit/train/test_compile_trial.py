"""train.compile=auto: when it compiles, what its trial finds, and that it says why not."""

import logging
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

from hpc_tune.config.constraints import find_compile_obstacle
from hpc_tune.config.load import load_config
from hpc_tune.config.tune import TuneConfig
from hpc_tune.engine.compile import compiling_in_process
from hpc_tune.errors import ConfigError
from hpc_tune.model.build import build
from hpc_tune.model.builtin import write_tiny_model
from hpc_tune.model.loss import write_fusible_exponentials
from hpc_tune.train.startup import compile_trial
from hpc_tune.train.startup.compile_trial import (
    MIN_TOLERANCES,
    _StepValues,
    check_compiled_blocks,
    check_compiled_blocks_cached,
    compare_steps,
    resolve_auto_compile,
)

LLAMA = AutoConfig.for_model("llama")
CPU, LORA = torch.device("cpu"), TuneConfig(targets=["q_proj", "v_proj", "down_proj"])
real_compile = torch.compile


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(directory)
    return build(directory, torch.float32, LORA, 0)


def config_of(*words):
    steps = [] if any("max_steps" in word for word in words) else ["train.max_steps=2000"]
    where = ["model.path=builtin:tiny", "data.path=builtin:pydocs"]
    return load_config(None, [*where, *steps, *words])


@pytest.fixture
def graphs(monkeypatch):
    """Have blocks traced and differentiated as by the compiler, without its C++; returns graphs."""
    found = []

    def compile_quickly(function):
        from torch._dynamo.backends.common import aot_autograd

        def count(graph, inputs):
            found.append(graph)
            return graph.forward

        return real_compile(function, backend=aot_autograd(fw_compiler=count))

    monkeypatch.setattr(torch, "compile", compile_quickly)
    return found


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.full), torch.bfloat16]
)
@pytest.mark.parametrize("recompute", ["none", pytest.param("full", marks=pytest.mark.full)])
def test_compiled_blocks_that_are_right_are_taken_and_other_lengths_have_one_graph(
    graphs, dtype, recompute
):
    assert check_compiled_blocks(LLAMA, LORA, dtype, CPU, recompute) == ""
    # Forward and backward of a block, of its first call with a mask and without; the loss.
    assert 0 < len(graphs) <= 5


@pytest.mark.full
@pytest.mark.parametrize("method", ["full", "dora"])
def test_other_methods_are_tried_with_the_compiler_itself(method):
    tune = LORA.model_copy(update={"method": method})
    assert check_compiled_blocks(LLAMA, tune, torch.float32, CPU, "none") == ""


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_compiled_blocks_that_compute_something_else_are_found(monkeypatch, which):
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 1.01 * x if which == "forward" else x.clone()

        @staticmethod
        def backward(ctx, grad):
            return 1.01 * grad if which == "backward" else grad

    def compile_wrongly(function):
        def computed(*args, **kwargs):
            out = function(*args, **kwargs)
            return out if out is None else Wrong.apply(out)

        return computed

    monkeypatch.setattr(torch, "compile", compile_wrongly)
    assert "with compiled blocks" in check_compiled_blocks(LLAMA, LORA, torch.float32, CPU, "none")


@pytest.mark.parametrize("which", ["losses", "gradients"])
def test_a_compiled_loss_that_is_something_else_is_found(monkeypatch, which):
    def compile_wrongly(function):
        def computed(*args, **kwargs):
            out = function(*args, **kwargs)
            if function is write_fusible_exponentials:
                logits_SV, _, losses_S1, _ = args
                (losses_S1 if which == "losses" else logits_SV).mul_(1.01)
            return out

        return computed

    monkeypatch.setattr(torch, "compile", compile_wrongly)
    assert "with compiled blocks" in check_compiled_blocks(LLAMA, LORA, torch.float32, CPU, "none")


def test_gradients_may_be_as_far_from_fp32_as_without_the_compiler():
    def step(loss, off):
        return _StepValues((loss,), {"w": torch.ones(4) + off})

    least = MIN_TOLERANCES[torch.bfloat16]
    assert compare_steps(step(1.0, 0), step(1.01, 0.02), step(0.98, 0.03), least) == ""
    assert "loss is" in compare_steps(step(1.0, 0), step(1.01, 0.02), step(1.05, 0.02), least)
    assert "off by 9" in compare_steps(step(1.0, 0), step(1.01, 0.02), step(1.01, 0.09), least)
    lacks = replace(step(1.0, 0), gradients={})
    assert "off by 1" in compare_steps(step(1.0, 0), step(1.0, 0.02), lacks, least)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], ""),
        (["train.max_steps=20"], "20 steps do not earn back a minute of compiling"),
        (["parallel.tensor=2"], "parallel.tensor > 1 is not available"),
        (["parallel.zero_stage=3"], "DeepSpeed gathers weights inside of the blocks"),
        (["parallel.zero_stage=2"], ""),
        (["tune.router_aux_loss=0.1"], "routers cannot be watched"),
    ],
)
def test_settings_that_do_not_go_with_compiled_blocks_are_said(words, said):
    config = config_of(*words)
    sections = config.parallel, config.tune, config.train
    assert said in (found := find_compile_obstacle(*sections, False))
    assert bool(said) == bool(found)
    assert not config.train.compiles
    assert "routers" in find_compile_obstacle(*sections, True)


def job_on(device, config):
    def run_on_rank_0(what, work):
        return work()

    comm = SimpleNamespace(device=torch.device(device), run_on_rank_0=run_on_rank_0)
    return SimpleNamespace(setup_comm=comm, config=config)


def test_auto_is_decided_on_gpus_alone_and_by_the_trial(built, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "hpc_tune")
    config = config_of()
    assert resolve_auto_compile(job_on("cpu", config), built).compile == "auto"
    monkeypatch.setattr(compile_trial, "check_compiled_blocks_cached", lambda *_: "")
    assert resolve_auto_compile(job_on("cuda", config), built).compile is True
    monkeypatch.setattr(
        compile_trial, "check_compiled_blocks_cached", lambda *_: "this torch has none"
    )
    assert resolve_auto_compile(job_on("cuda", config), built).compile is False
    assert "blocks are not compiled: this torch has none" in caplog.text
    for value in ("true", "false"):
        asked = config_of(f"train.compile={value}")
        assert resolve_auto_compile(job_on("cuda", asked), built) is asked.train


def test_a_trial_is_made_once_and_one_that_ended_by_an_exception_again(
    built, monkeypatch, tmp_path, caplog
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tried = []
    outcomes = iter([RuntimeError("no room"), "a loss", "another"])

    def try_once(*_):
        tried.append(outcome := next(outcomes))
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(compile_trial, "check_compiled_blocks", try_once)
    assert "fails with RuntimeError: no room" in check_compiled_blocks_cached(built, "none", CPU)
    assert check_compiled_blocks_cached(built, "none", CPU) == "a loss"
    assert check_compiled_blocks_cached(built, "none", CPU) == "a loss"
    assert len(tried) == 2
    assert check_compiled_blocks_cached(built, "full", CPU) == "another"


def test_without_a_compiler_nothing_is_tried(built, monkeypatch):
    def refuse(*_):
        raise ConfigError("no compiler")

    monkeypatch.setattr(compile_trial, "require_compiler", refuse)
    monkeypatch.setattr(compile_trial, "check_compiled_blocks", None)
    assert check_compiled_blocks_cached(built, "none", CPU) == "no compiler"


def test_a_trial_compiles_alone_in_its_own_folder(monkeypatch, tmp_path):
    from torch._inductor import config

    monkeypatch.setenv("TRITON_CACHE_DIR", "elsewhere")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    before = config.compile_threads
    with compiling_in_process(tmp_path):
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path)
        assert config.compile_threads == 1
    assert os.environ["TRITON_CACHE_DIR"] == "elsewhere"
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    assert config.compile_threads == before
