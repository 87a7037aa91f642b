"""Routers that are watched: gradients beside transformers' own logits, in any cut and recompute."""

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from hpc_tune.config.tune import TuneConfig
from hpc_tune.data.packed_rows import make_batch
from hpc_tune.engine.activation_checkpoint import checkpoint_blocks
from hpc_tune.model.balance import (
    RouterWatch,
    find_router_modules,
    find_router_score_function,
    list_routers,
)
from hpc_tune.model.build import build
from hpc_tune.model.layers import find_blocks
from hpc_tune.model.load import allocate, load_weights
from tests.support.mixtures import write_mixture

LENGTHS = (21, 40, 1, 33)  # of rows, which are padded to the longest of a micro-batch
BALANCE, Z = 0.3, 0.05
FAMILIES = {"qwen3_moe": "softmax", "mixtral": "softmax", "deepseek_v3": "sigmoid"}
TUNE = {"method": "full", "router_aux_loss": BALANCE, "router_z_loss": Z}


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixtures")
    return {family: write_mixture(family, folder / family) for family in FAMILIES}


def documents():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 256, (length,), generator=generator) for length in LENGTHS]


def batches(micro):
    rows = [[(tokens.numpy(), torch.ones(len(tokens)).bool().numpy())] for tokens in documents()]
    cuts = range(0, len(rows), micro)
    return [make_batch(rows[at : at + micro], max(LENGTHS), at) for at in cuts]


def loaded(directory, tune, score, recompute="none"):
    built = build(directory, torch.float32, tune, 0)
    checkpoint_blocks(list(find_blocks(built.module)), recompute)
    watch = RouterWatch(list_routers(built.module), score, tune)
    watch.hook_routers([built.module], torch.device("cpu"))
    allocate(built.module, torch.device("cpu"))
    load_weights(built)
    return built, watch


def step(built, watch, micro):
    """Return the loss, what routers did, and all gradients of one step."""
    built.module.train()
    watch.begin(1 / sum(LENGTHS))
    loss = 0.0
    for batch in batches(micro):
        out = built.module(batch)
        (out[0] / sum(n - 1 for n in LENGTHS)).backward()
        loss += out[0].item()
    trained = built.module.named_parameters()
    gradients = {n: p.grad.clone() for n, p in trained if p.grad is not None}
    built.module.zero_grad()
    return loss, watch.interpret_sums(watch.sums.tolist()), gradients


def stock(directory, score, balance, z):
    """Return the same of transformers' model, its routers' logits and choices, row by row."""
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    seen, handles = [], []
    for name, module in model.named_modules():
        if name.endswith(".gate"):
            handles.append(module.register_forward_hook(lambda *given: seen.append(given[2])))
    loss = of_balance = of_z = 0.0
    counts = {}
    for tokens_T in documents():
        seen.clear()
        logits_TV = model(input_ids=tokens_T.unsqueeze(0), use_cache=False).logits[0]
        loss = loss + F.cross_entropy(logits_TV[:-1], tokens_T[1:], reduction="sum")
        for layer, (logits_TE, _, chosen_TK) in enumerate(seen):
            (T, E), K = logits_TE.shape, chosen_TK.shape[1]
            probs_TE = logits_TE.softmax(1)
            if score == "sigmoid":
                probs_TE = logits_TE.sigmoid() / logits_TE.sigmoid().sum(1, keepdim=True)
            counts_E = F.one_hot(chosen_TK, E).sum((0, 1))
            of_balance = of_balance + T * E / (K * T**2) * (counts_E * probs_TE.sum(0)).sum()
            of_z = of_z + logits_TE.logsumexp(1).square().sum()
            counts[layer] = counts.get(layer, 0) + counts_E
    whole = loss / sum(n - 1 for n in LENGTHS) + (balance * of_balance + z * of_z) / sum(LENGTHS)
    whole.backward()
    gradients = {f"model.{n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    numbers = [row.tolist() for row in counts.values()]
    return loss.item(), (of_balance.item(), of_z.item(), numbers), gradients


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_transformers_whatever_the_micro_batch_and_recompute(
    mixtures, family
):
    directory, score = mixtures[family], FAMILIES[family]
    loss, (balance, z, counts), gradients = stock(directory, score, BALANCE, Z)
    _, _, without = stock(directory, score, 0.0, 0.0)
    for recompute in ("none", "selective", "full"):
        built, watch = loaded(directory, TuneConfig(**TUNE), score, recompute)
        for micro in (1, 4):
            found, routers, ours = step(built, watch, micro)
            assert found == pytest.approx(loss, rel=1e-5)
            assert routers.balance == pytest.approx(balance, rel=1e-5)
            assert routers.z == pytest.approx(z, rel=1e-5)
            assert routers.counts == counts
            assert ours.keys() == gradients.keys()
            for name, gradient in gradients.items():
                assert torch.allclose(ours[name], gradient, atol=1e-5, rtol=1e-4), name
    gates = [name for name in gradients if name.endswith("gate.weight")]
    assert gates
    assert not any(torch.allclose(gradients[n], without[n], atol=1e-3) for n in gates)


def test_without_losses_tokens_are_counted_and_no_gradient_changes(mixtures):
    directory = mixtures["qwen3_moe"]
    _, (_, _, counts), gradients = stock(directory, "softmax", 0.0, 0.0)
    built, watch = loaded(directory, TuneConfig(method="full"), "softmax", "full")
    _, routers, ours = step(built, watch, 2)
    assert (routers.balance, routers.z, routers.counts) == (0.0, 0.0, counts)
    for name, gradient in gradients.items():
        assert torch.allclose(ours[name], gradient, atol=1e-6), name


def test_adapters_on_attention_learn_balance_under_frozen_routers(mixtures):
    directory, found = mixtures["mixtral"], []
    for settings in ({}, {"router_aux_loss": 1.0}):
        tune = TuneConfig(method="lora", rank=4, **settings)
        built, watch = loaded(directory, tune, "softmax")
        torch.manual_seed(0)
        with torch.no_grad():
            for name, parameter in built.module.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.1)
        found.append(step(built, watch, 4)[2])
    plain, balanced = found
    assert plain.keys() == balanced.keys()
    assert all("self_attn" in name for name in plain)
    changed = [name for name in plain if not torch.allclose(plain[name], balanced[name], atol=1e-6)]
    assert any("layers.0" in name for name in changed)


def test_a_router_with_an_adapter_is_still_one_router(mixtures):
    tune = TuneConfig(rank=4, targets=["q_proj", "experts", "gate"], router_aux_loss=1.0)
    built, watch = loaded(mixtures["mixtral"], tune, "softmax")
    plain, _ = loaded(mixtures["mixtral"], TuneConfig(), "softmax")
    found, wanted = (list_routers(b.module) for b in (built, plain))
    assert [(r.layer, r.num_experts) for r in found] == [(r.layer, r.num_experts) for r in wanted]
    _, routers, gradients = step(built, watch, 4)
    assert [sum(row) for row in routers.counts] == [2 * sum(LENGTHS)] * len(found)
    assert all(gradients[n].any() for n in gradients if "gate" in n and "lora_B" in n)


def test_nothing_is_counted_in_evaluation(mixtures):
    built, watch = loaded(mixtures["mixtral"], TuneConfig(**TUNE), "softmax")
    built.module.eval()
    built.module(batches(4)[0])
    assert not watch.sums.any()


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_familys_routers_weigh_by_is_tried(mixtures, family):
    built, _ = loaded(mixtures[family], TuneConfig(**TUNE), FAMILIES[family])
    run = lambda: built.module.eval()(batches(4)[0])  # noqa: E731
    assert find_router_score_function(built.module, run) == FAMILIES[family]


def test_routers_of_an_unknown_form_are_not_watched_though_transformers_has_a_loss(mixtures):
    built, _ = loaded(mixtures["mixtral"], TuneConfig(**TUNE), "softmax")
    routers = find_router_modules(built.module).values()

    def run():
        for router in routers:
            router(torch.zeros(4, router.weight.shape[1]))

    handles = [r.register_forward_hook(lambda _module, _given, out: out[:2]) for r in routers]
    assert find_router_score_function(built.module, run) == ""
    for handle in handles:
        handle.remove()
    assert find_router_score_function(built.module, run) == "softmax"
