import copy
import weakref

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from transformers import LlamaConfig, LlamaForCausalLM

from hpc_tune.engine import wrap
from hpc_tune.engine.wrap import num_workers, prepare_compiler, wrap_blocks
from hpc_tune.errors import ConfigError

GIB = 1 << 30


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
        use_cache=False,
    )
    adapted = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=4, target_modules="all-linear"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return adapted.train()


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that operators make, and the most that live at once."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self.known = WeakIdKeyDictionary()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage() not in self.known:
                storage = tensor.untyped_storage()
                self.known[storage] = True
                self.live += storage.nbytes()
                weakref.finalize(storage, self.free, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return out

    def free(self, num_bytes):
        self.live -= num_bytes


def step(model, recompute):
    """Return (loss, gradients, peak bytes of memory beside the model) of one step."""
    model = copy.deepcopy(model)
    blocks = list(model.base_model.model.model.layers)
    wrap_blocks(blocks, recompute, compile_blocks=False)
    tokens_BT = torch.arange(512).view(4, 128) % 100
    with LiveBytes() as counted:
        loss = model(input_ids=tokens_BT).logits.logsumexp(-1).sum()
        loss.backward()
    return loss.item(), [p.grad for p in model.parameters() if p.requires_grad], counted.peak


def test_selective_recompute_takes_less_memory_than_none_and_more_than_full_to_the_same_bits(model):
    loss, gradients, most = step(model, "none")
    memory = {}
    for recompute in ("selective", "full"):
        same_loss, same_gradients, memory[recompute] = step(model, recompute)
        assert same_loss == loss
        assert all(map(torch.equal, same_gradients, gradients))
    print({"none": most} | memory)
    assert memory["full"] < 0.8 * memory["selective"] < 0.8 * 0.8 * most


def test_blocks_that_need_nothing_are_left_alone():
    block = nn.Linear(2, 2)
    wrap_blocks([block], "none", compile_blocks=False)
    assert "forward" not in vars(block)


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
    assert num_workers(threads, host_bytes) == workers


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


def test_the_ranks_of_a_node_share_a_folder_and_nodes_do_not(tmp_path, monkeypatch):
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")
    for node in (0, 0, 1):
        prepare_compiler(tmp_path, node, torch.device("cpu"), 1, GIB)
    assert sorted(p.name.split("-")[1] for p in tmp_path.iterdir()) == ["0", "1"]
    assert wrap.torch._inductor.config.compile_threads == 1
