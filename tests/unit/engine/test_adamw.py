import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Trainer,
    TrainingArguments,
    get_cosine_with_hard_restarts_schedule_with_warmup,
    get_wsd_schedule,
)

from hpc_tune.config.schema import OptimConfig
from hpc_tune.engine.adamw import (
    learning_rate,
    make_adamw,
    parameter_groups,
    set_lr,
    with_scaled_lr,
)


def rates(total_steps, **values):
    optim = OptimConfig(lr=8.0, **values)
    return [learning_rate(optim, step, total_steps) for step in range(total_steps)]


@pytest.mark.parametrize(
    ("values", "total_steps", "wanted"),
    [
        ({"schedule": "constant"}, 3, [8, 8, 8]),
        ({"schedule": "constant", "warmup_steps": 4}, 6, [2, 4, 6, 8, 8, 8]),
        ({"schedule": "linear", "min_lr_ratio": 0.0}, 5, [8, 6, 4, 2, 0]),
        ({"schedule": "linear", "min_lr_ratio": 0.5}, 5, [8, 7, 6, 5, 4]),
        ({"schedule": "linear", "warmup_steps": 2, "min_lr_ratio": 0.0}, 7, [4, 8, 8, 6, 4, 2, 0]),
        # 4 (1 + cos(pi t)) at t = 0, 1/3, 2/3, 1
        ({"schedule": "cosine", "min_lr_ratio": 0.0}, 4, [8, 6, 2, 0]),
        ({"schedule": "cosine", "min_lr_ratio": 0.5}, 4, [8, 7, 5, 4]),
        ({"schedule": "cosine", "warmup_steps": 1, "min_lr_ratio": 0.0}, 5, [8, 8, 6, 2, 0]),
        ({"schedule": "cosine"}, 1, [8]),
        ({"schedule": "wsd"}, 1, [8]),
        ({"schedule": "cosine_with_restarts"}, 1, [8]),
        ({"schedule": "wsd", "min_lr_ratio": 0.0}, 6, [8, 8, 8, 8, 8, 0]),
        (
            {"schedule": "wsd", "decay_ratio": 0.5, "warmup_steps": 2, "min_lr_ratio": 0.5},
            8,
            [4, 8, 8, 8, 7, 6, 5, 4],
        ),
        (
            {"schedule": "wsd", "decay_ratio": 1.0, "warmup_steps": 1, "min_lr_ratio": 0.0},
            4,
            [8, 8, 4, 0],
        ),
        ({"schedule": "wsd", "warmup_steps": 4}, 2, [2, 4]),
        # 4 (1 + cos(pi t)) at t = 0, 2/3, 1/3, 1
        ({"schedule": "cosine_with_restarts", "min_lr_ratio": 0.0}, 4, [8, 2, 6, 0]),
        ({"schedule": "cosine", "warmup_steps": 2}, 3, [4, 8, 8]),
        ({"schedule": "linear", "warmup_steps": 4}, 2, [2, 4]),
        ({"schedule": "constant", "warmup_ratio": 0.5}, 6, [8 / 3, 16 / 3, 8, 8, 8, 8]),
        ({"schedule": "constant", "warmup_ratio": 0.5}, 3, [4, 8, 8]),
        ({"schedule": "constant", "warmup_ratio": 0.0}, 100, [8] * 100),
        ({"schedule": "constant"}, 33, [8] * 33),
        ({"schedule": "constant"}, 100, [8 / 3, 16 / 3, *[8] * 98]),
    ],
)
def test_the_learning_rate_follows_the_table(values, total_steps, wanted):
    assert rates(total_steps, **values) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("values", "global_size", "wanted"),
    [
        ({}, 256, 8.0),
        ({"reference_batch": 64}, 64, 8.0),
        ({"reference_batch": 64}, 256, 16.0),
        ({"reference_batch": 64}, 16, 4.0),
        ({"reference_batch": 64, "batch_scaling": "linear"}, 256, 32.0),
    ],
)
def test_the_rate_follows_the_batch_where_a_reference_is_given(values, global_size, wanted):
    assert with_scaled_lr(OptimConfig(lr=8.0, **values), global_size).lr == pytest.approx(wanted)


@pytest.mark.parametrize("ratio", [0.0, 0.03, 0.1, 0.25, 0.333, 0.9])
def test_a_share_is_as_many_steps_as_for_transformers(ratio, tmp_path):
    arguments = TrainingArguments(str(tmp_path), warmup_steps=ratio, use_cpu=True)
    for steps in (1, 7, 10, 30, 33, 70, 1000):
        ours = OptimConfig(warmup_ratio=ratio).num_warmup_steps(steps)
        assert ours == arguments.get_warmup_steps(steps)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
def test_the_last_step_has_the_lowest_rate_and_nothing_goes_below_it(schedule):
    optim = OptimConfig(lr=1.0, schedule=schedule, warmup_steps=10, min_lr_ratio=0.1)
    if schedule == "wsd":
        optim = optim.model_copy(update={"decay_ratio": 0.5})
    falling = [learning_rate(optim, step, 100) for step in range(9, 151)]
    assert falling[0] == 1.0
    assert falling[99 - 9] == pytest.approx(0.1)
    assert min(falling) == pytest.approx(0.1)
    assert falling[: 99 - 9] == sorted(falling[: 99 - 9], reverse=True)
    assert falling[150 - 9] == pytest.approx(0.1)


def test_matrices_decay_and_vectors_do_not():
    matrix, vector = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(4))
    adamw = make_adamw([("v", vector), ("m", matrix)], OptimConfig(lr=0.1, weight_decay=0.5))
    for parameter in (matrix, vector):
        parameter.grad = torch.zeros_like(parameter)
    adamw.step()
    assert torch.allclose(matrix, torch.full((2, 3), 1 - 0.1 * 0.5))
    assert torch.equal(vector, torch.ones(4))


def test_the_state_is_there_before_the_first_step_and_a_step_is_plain_adamw():
    torch.manual_seed(0)
    mine, plain = (nn.Parameter(torch.full((3, 2), 0.5)) for _ in range(2))
    optim = OptimConfig(lr=0.01, beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.1)
    adamw = make_adamw([("mine", mine)], optim)
    assert {k: v.numel() for k, v in adamw.state[mine].items()} == {
        "step": 1,
        "exp_avg": 6,
        "exp_avg_sq": 6,
    }
    reference = torch.optim.AdamW([plain], lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    for _ in range(5):
        mine.grad = torch.randn(3, 2)
        plain.grad = mine.grad.clone()
        adamw.step()
        reference.step()
    assert torch.allclose(mine, plain, rtol=1e-6)


def test_the_moments_of_each_parameter_are_announced():
    named, announced = [], []
    named += [("a", nn.Parameter(torch.ones(3, 2))), ("b", nn.Parameter(torch.ones(5)))]
    make_adamw(named, OptimConfig(lr=1.0), announced.append)
    assert announced == [2 * 6 * 4, 2 * 5 * 4]


def test_only_vectors_make_one_group():
    adamw = make_adamw([("v", nn.Parameter(torch.ones(3)))], OptimConfig(lr=1.0, weight_decay=0.5))
    assert [group["weight_decay"] for group in adamw.param_groups] == [0.0]


def adapted(method):
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    words = {"r": 3, "target_modules": ["0", "2"], "use_dora": method == "dora"}
    return get_peft_model(net, LoraConfig(**words))


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_b_of_adapters_learns_at_its_ratio_as_with_peft(method):
    ours, theirs = adapted(method), adapted(method)
    named = [(n, p) for n, p in ours.named_parameters() if p.requires_grad]
    optim = OptimConfig(lr=0.01, lora_b_ratio=16, weight_decay=0.1, schedule="linear")
    adamw = make_adamw(named, optim)
    settings = {"betas": (0.9, 0.999), "eps": 1e-8, "loraplus_weight_decay": 0.1}
    reference = create_loraplus_optimizer(
        theirs, torch.optim.AdamW, lr=0.01, loraplus_lr_ratio=16, **settings
    )
    if method == "dora":  # peft decays magnitudes with B
        for group in reference.param_groups:
            vectors = [p for p in group["params"] if p.dim() < 2]
            if vectors and group["weight_decay"]:
                group["params"] = [p for p in group["params"] if p.dim() >= 2]
                reference.add_param_group(
                    {"params": vectors, "lr": group["lr"], "weight_decay": 0.0}
                )
    scheduler = torch.optim.lr_scheduler.LambdaLR(reference, lambda step: 1 - step / 10)
    for step in range(6):
        x = torch.randn(5, 6)
        for model in (ours, theirs):
            model.zero_grad()
            model(x).square().sum().backward()
        set_lr(adamw, 0.01 * (1 - step / 10))
        adamw.step()
        reference.step()
        scheduler.step()
    others = dict(theirs.named_parameters())
    for name, parameter in named:
        assert torch.allclose(parameter, others[name], rtol=1e-5, atol=1e-7), name
    assert len(named) == (6 if method == "dora" else 4)


def test_one_rate_for_all_makes_the_groups_it_always_made():
    named = [(n, p) for n, p in adapted("dora").named_parameters() if p.requires_grad]
    groups = make_adamw(named, OptimConfig(lr=0.01)).param_groups
    assert [len(group["params"]) for group in groups] == [4, 2]


def stepped(schedule, warmup, total_steps):
    """Our rates, and those of a schedule of transformers that ends at our last step.

    Theirs ends one step after the last, and begins its warm-up at 0.
    """
    adamw = torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=8.0)
    scheduler, theirs = schedule(adamw, warmup, total_steps - 1), []
    for _ in range(total_steps):
        theirs.append(scheduler.get_last_lr()[0])
        adamw.step()
        scheduler.step()
    return [theirs[step + 1 if step < warmup else step] for step in range(total_steps)]


@pytest.mark.parametrize("warmup", [0, 3, 10])
@pytest.mark.parametrize("total_steps", [20, 41, 100])
@pytest.mark.parametrize(("decay_ratio", "min_lr_ratio"), [(0.1, 0.0), (0.25, 0.1), (0.5, 0.5)])
def test_wsd_is_the_one_of_transformers(warmup, total_steps, decay_ratio, min_lr_ratio):
    def schedule(adamw, warmup, last_step):
        decay = min(math.ceil(decay_ratio * total_steps), last_step - warmup)
        return get_wsd_schedule(
            adamw, warmup, decay, last_step, decay_type="linear", min_lr_ratio=min_lr_ratio
        )

    settings = {"schedule": "wsd", "decay_ratio": decay_ratio, "min_lr_ratio": min_lr_ratio}
    ours = rates(total_steps, warmup_steps=warmup, **settings)
    theirs = stepped(schedule, warmup, total_steps)
    assert ours[warmup:] == pytest.approx(theirs[warmup:], abs=1e-12)
    if not min_lr_ratio:  # their warm-up begins there
        assert ours == pytest.approx(theirs, abs=1e-12)


@pytest.mark.parametrize("warmup", [0, 3, 10])
@pytest.mark.parametrize("total_steps", [20, 41, 100])
@pytest.mark.parametrize("restarts", [1, 2, 5])
def test_cosines_with_restarts_are_those_of_transformers(warmup, total_steps, restarts):
    def schedule(adamw, warmup, last_step):
        return get_cosine_with_hard_restarts_schedule_with_warmup(
            adamw, warmup, last_step, num_cycles=restarts + 1
        )

    settings = {"schedule": "cosine_with_restarts", "restarts": restarts, "min_lr_ratio": 0.0}
    ours = rates(total_steps, warmup_steps=warmup, **settings)
    assert ours == pytest.approx(stepped(schedule, warmup, total_steps), abs=1e-12)


@pytest.mark.parametrize(
    ("kind", "said", "spared"),
    [
        ("cohere", {"use_qk_norm": True}, {"q_norm.weight", "k_norm.weight"}),
        (
            "gpt_oss",
            {"num_local_experts": 4},
            {"experts.gate_up_proj_bias", "experts.down_proj_bias"},
        ),
        ("llama", {}, set()),
        ("stablelm", {"qk_layernorm": True}, set()),
        ("falcon", {"bias": True}, set()),
    ],
)
def test_weight_decay_spares_the_norms_and_biases_that_transformers_does(kind, said, spared):
    """Some families give them two dimensions: ``spared``, by how their names end."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 32, "pad_token_id": 0}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **said))
    stock = set(Trainer.get_decay_parameter_names(None, model))
    named = dict(model.named_parameters())
    decayed = {
        name
        for group in parameter_groups(named.items(), OptimConfig(weight_decay=0.1))
        for name, parameter in named.items()
        if group["weight_decay"] and any(parameter is one for one in group["params"])
    }
    # Of vectors with other names, such as gpt-oss's sinks, only the Trainer lets them decay.
    assert decayed == {name for name in stock if name in named and named[name].dim() > 1}
    of_two_dims = {n for n, p in named.items() if p.dim() > 1 and n not in decayed}
    assert {".".join(name.split(".")[-2:]) for name in of_two_dims} == spared
