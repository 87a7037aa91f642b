"""Try which architectures train correctly, by method and layout, and write docs/models.md.

    python tools/matrix.py [--only NAME ...] [--methods ...] [--layouts ...] [--out docs/models.md]

Each architecture is made small (see hpc_tune/model/stock_reference.py), with random weights. Stock
transformers and peft with torch's AdamW train it for a few steps, one document at a time; so does
hpc_tune, from the same files, in every method and layout. A cell is the largest relative gap
between losses of a step. A gap of more than 1e-4, or a crash, is an error, and the exit code is 1.
What hpc_tune refuses is listed with the reason. An existing page keeps what was not tried.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from matrix_models import MODELS, SEEDS, config_of
from matrix_page import LAYOUTS, METHODS, Note, Page
from matrix_ranks import LENGTHS, LR, RANKS, ROWS_PER_LAUNCH, SEED, STEPS, documents

from hpc_tune.config.tune import TuneConfig
from hpc_tune.errors import HpcTuneError
from hpc_tune.memory.host import trim_heap
from hpc_tune.model.adapters import keep_peft_target_names, resolve_targets
from hpc_tune.model.build import build
from hpc_tune.model.dropout import disable_dropout
from hpc_tune.model.experts import find_routers, has_experts
from hpc_tune.model.grouped_experts import can_group_experts, stack_names
from hpc_tune.model.language import auto_model_class, read_config, read_language_config
from hpc_tune.model.layers import find_blocks, find_unreplaceable_linears
from hpc_tune.model.load import allocate, load_weights
from hpc_tune.model.loss import find_decoder
from hpc_tune.model.stock_reference import UncheckableArchitecture, write_small_model
from hpc_tune.packages import collect_frozen_garbage
from hpc_tune.step.layout import pipeline_problems
from hpc_tune.step.slices import slicing_problems
from hpc_tune.train.startup.architecture_check import ArchitectureCheck, check_architecture_cached

ROOT = Path(__file__).resolve().parent.parent
PYTHON = [sys.executable]  # the command that runs a rank
JITTER = 1e-7
TOLERANCE = 1e-4  # after steps of AdamW, which amplifies small gradients
LAUNCH_S = 3600.0
QUANTIZATION = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
}


def train_stock(directory: Path, method: str, jitter: float = 0.0) -> list[float]:
    """Return the losses of stock transformers, peft and AdamW, one document at a time.

    ``jitter``: relative noise on the weights, like rounding.
    """
    from transformers import BitsAndBytesConfig

    auto = auto_model_class(read_config(directory))
    model: Any = auto.from_pretrained(directory, dtype=torch.float32)
    if method == "qlora":
        quantized = BitsAndBytesConfig(
            **QUANTIZATION,
            bnb_4bit_compute_dtype=torch.float32,
            llm_int8_skip_modules=_linears_outside_blocks(model),
        )
        options = {"quantization_config": quantized, "device_map": {"": "cpu"}}
        _round(model, auto.from_pretrained(directory, dtype=torch.float32, **options))
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        for parameter in model.parameters() if jitter else ():
            parameter.mul_(1 + jitter * torch.randn_like(parameter))
    if method != "full":
        model = _with_our_adapters(model, directory, method)
    model.eval()  # without dropout; nothing else differs
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=LR[method], weight_decay=0.0
    )
    losses = []
    for _ in range(STEPS):
        total = 0.0
        for tokens_T in documents():
            ids_BT = tokens_T.unsqueeze(0)
            loss = model(input_ids=ids_BT, labels=ids_BT, use_cache=False).loss
            share = loss * (len(tokens_T) - 1) / sum(length - 1 for length in LENGTHS)
            share.backward()
            total += share.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def _train_stock_once(directory: Path, method: str) -> list[float]:
    """Return the result of ``train_stock``, cached beside the model."""
    kept = directory / f"stock-{method}.json"
    if not kept.exists():
        kept.write_text(json.dumps(train_stock(directory, method)))
    losses: list[float] = json.loads(kept.read_text())
    return losses


@torch.no_grad()
def _round(model: Any, quantized: Any) -> None:
    """Round a model's linear layers and experts to the values of bitsandbytes' 4-bit format.

    bitsandbytes quantizes only linear layers, and on CPUs computes some in bf16 regardless.
    """
    from bitsandbytes.nn import Linear4bit

    for name, layer in quantized.named_modules():
        if isinstance(layer, Linear4bit):
            _round_matrix(model.get_parameter(f"{name}.weight"))
    for experts in filter(can_group_experts, model.modules()):
        for name in stack_names(experts):
            for matrix in experts.get_parameter(name):
                _round_matrix(matrix)
    # As in every quantized model: some layers with a state then call modules, not read weights.
    model.config.get_text_config()._is_quantized = True


def _round_matrix(matrix: torch.Tensor) -> None:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    # As one row: on CPUs with AVX512 it uses wrong scales for rows that are not whole blocks.
    packed = quantize_4bit(
        matrix.reshape(1, -1), blocksize=64, quant_type="nf4", compress_statistics=True
    )
    matrix.copy_(dequantize_4bit(*packed).view(matrix.shape))


def _linears_outside_blocks(model: Any) -> list[str]:
    """Return the names of the linear layers that hpc_tune does not quantize.

    It quantizes those in the decoder's blocks, except routers and special layers. The blocks of
    parts for images, which may be more and larger, do not count.
    """
    blocks = find_blocks(find_decoder(model))
    whole = {*find_routers(blocks), *find_unreplaceable_linears(blocks)}
    inside = set(blocks.modules()) - {blocks.get_submodule(path) for path in whole}
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module not in inside
    ]


def _with_our_adapters(model: Any, directory: Path, method: str) -> Any:
    """Add peft's adapters to a model, with the initial values that hpc_tune gives them."""
    from matrix_ranks import settings
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    row = {"directory": str(directory), "method": method, "layout": "one"}
    ours = build(directory, torch.float32, settings(row).tune, SEED)
    allocate(ours.module, torch.device("cpu"))
    load_weights(ours)
    parameters = dict(ours.module.named_parameters())
    values = {saved: parameters[name].detach() for name, saved in ours.saved_names.items()}
    targets = resolve_targets(model, settings(row).tune)
    modules = targets.modules
    if not isinstance(modules, str):  # the whole model does not know a head inside a part
        modules = [name for name in modules if not name.endswith(".lm_head")]
    adapters = LoraConfig(
        r=8,
        lora_alpha=16,
        target_modules=modules,
        target_parameters=list(targets.parameters) or None,
        use_dora=method == "dora",
        task_type="CAUSAL_LM",
    )
    with keep_peft_target_names():
        model = get_peft_model(model, adapters)
    if passed_over := set_peft_model_state_dict(model, values).unexpected_keys:
        raise ValueError(f"peft passes over {len(passed_over)} adapters, such as {passed_over[0]}")
    return model


def launch(rows: list[dict[str, Any]], ranks: int, work: Path) -> list[dict[str, Any]]:
    """Train rows in as few launches as possible; a row that ends its launch is a crash.

    If the same rows were begun before in ``work``, train only the remaining ones.
    """
    listed, results = work / f"rows-{ranks}.json", work / f"results-{ranks}.jsonl"
    if not listed.exists() or json.loads(listed.read_text()) != rows:
        results.write_text("")
    listed.write_text(json.dumps(rows))
    while (done := len(results.read_text().splitlines())) < len(rows):
        command = ["mpirun", "-np", str(ranks), *PYTHON, str(ROOT / "tools/matrix_ranks.py")]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        ended = subprocess.run(
            [*command, str(listed), str(results), str(done)],
            capture_output=True,
            text=True,
            timeout=LAUNCH_S,
            env=environment,
        )
        now = len(results.read_text().splitlines())
        if ended.returncode and now < min(done + ROWS_PER_LAUNCH, len(rows)) or now == done:
            said = [line for line in ended.stderr.splitlines() if "Error" in line] or ["no word"]
            with results.open("a") as out:
                out.write(json.dumps({"crash": said[-1]}) + "\n")
            print(f"crash in {rows[now]}: {said[-1]}", flush=True)
    return [json.loads(line) for line in results.read_text().splitlines()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the matrix; see above."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=sorted(MODELS), default=sorted(MODELS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--work", type=Path, help="keep results there, and resume from them")
    parser.add_argument("--out", type=Path, help="also write the page there")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        work = options.work or Path(folder)
        proofs = {name: _prepare(name, work) for name in options.only}
        rows = [
            {"name": name, "directory": str(work / name), "method": method, "layout": layout}
            | {"packing": not proof.packing, "attention": not proof.attention}
            for name, proof in proofs.items()
            if not proof.loss
            for method in options.methods
            for layout in options.layouts
            if has_experts(read_language_config(work / name)) or "expert" not in method + layout
            if not _find_refusal(name, proof, layout, work / name)
            and not (method == "qlora" and proof.adapters)
        ]
        cells = _cells(rows, work)
        page = _page(proofs, cells, options.methods, work)
    versions = f"transformers {transformers.__version__} and torch {torch.__version__}"
    table = page.text(versions, sorted(MODELS))
    wrong = {key: text for key, text in cells.items() if text.startswith(("WRONG", "CRASH"))}
    print(table)
    for (name, method, layout), text in wrong.items():
        print(f"{name} {method} {layout}: {text}", file=sys.stderr)
    if options.out:
        if options.out.exists():
            rest = Page.read(options.out.read_text(encoding="utf-8"))
            page = rest.update(page, options.only, options.methods, options.layouts)
        options.out.write_text(page.text(versions, sorted(MODELS)), encoding="utf-8")
    return 1 if wrong else 0


def _prepare(name: str, work: Path) -> ArchitectureCheck:
    """Write the small model of an architecture and return the result of its check."""
    print(f"trying {name}", file=sys.stderr, flush=True)
    try:
        config = config_of(name)
        disable_dropout(config)
        (work / name).mkdir(parents=True, exist_ok=True)
        proof = check_architecture_cached(config, TuneConfig(method="qlora"))
        if not proof.loss:
            write_small_model(config, work / name, SEEDS.get(name, 0))
        return proof
    except (UncheckableArchitecture, ValueError, TypeError) as error:
        return ArchitectureCheck(loss=f"no small model of this kind could be tried: {error}")


def _find_refusal(name: str, proof: ArchitectureCheck, layout: str, directory: Path) -> str:
    """Return why a layout does not suit an architecture, or an empty string."""
    if layout not in ("tensor", "pipeline"):
        return ""
    config = read_language_config(directory)
    if layout == "tensor":
        return next(iter(slicing_problems(config, 2)), "") or proof.tensor
    num_blocks = config.num_hidden_layers
    return next(iter(pipeline_problems(config, num_blocks, 2, 1)), "") or proof.pipeline


def _cells(rows: list[dict[str, Any]], work: Path) -> dict[tuple[str, str, str], str]:
    """Return the cell of each row: the gap to stock, or the text that replaces it."""
    cells: dict[tuple[str, str, str], str] = {}
    wanted: dict[tuple[str, str], list[float] | str] = {}
    noise: dict[tuple[str, str], float] = {}
    for row in rows:
        key = row["name"], row["method"]
        if key not in wanted:
            print(f"stock {key[0]} {key[1]}", file=sys.stderr, flush=True)
            try:
                wanted[key] = _train_stock_once(Path(row["directory"]), row["method"])
            except HpcTuneError as error:
                wanted[key] = str(error)
            except Exception as error:  # noqa: BLE001 - a model's own code may raise anything
                wanted[key] = f"stock fails: {type(error).__name__}: {str(error)[:120]}"
            collect_frozen_garbage()  # of two models, in reference cycles
            trim_heap()
    tried = [row for row in rows if not isinstance(wanted[row["name"], row["method"]], str)]
    for ranks in sorted(set(RANKS.values())):
        mine = [row for row in tried if RANKS[row["layout"]] == ranks]
        for row, told in zip(mine, launch(mine, ranks, work) if mine else [], strict=True):
            stock_losses: Any = wanted[row["name"], row["method"]]
            key = row["name"], row["method"]
            cell = (*key, row["layout"])
            cells[cell] = word = _format_cell(told, stock_losses)
            if word.startswith("WRONG"):
                if key not in noise:
                    noise[key] = _gap(
                        train_stock(Path(row["directory"]), key[1], JITTER), stock_losses
                    )
                if (gap := _gap(told["losses"], stock_losses)) <= 2 * noise[key]:
                    cells[cell] = f"{gap:.0e} of {noise[key]:.0e}"
    for row in rows:
        said = wanted[row["name"], row["method"]]
        if isinstance(said, str):
            cells[row["name"], row["method"], row["layout"]] = f"refused: {said}"
    return cells


def _format_cell(told: dict[str, Any], wanted: list[float]) -> str:
    if "crash" in told:
        return f"CRASH {told['crash']}"
    if "error" in told:
        return f"refused: {told['error']}"
    gap = _gap(told["losses"], wanted)
    return f"{gap:.0e}" if gap <= TOLERANCE else f"WRONG {gap:.1e}"


def _gap(losses: Sequence[float], wanted: Sequence[float]) -> float:
    return max(abs(a - b) / b for a, b in zip(losses, wanted, strict=True))


def _page(
    proofs: dict[str, ArchitectureCheck],
    cells: dict[tuple[str, str, str], str],
    methods: Sequence[str],
    work: Path,
) -> Page:
    """Return the page: its rows, and notes on what is refused."""
    page = Page()
    for name, proof in proofs.items():
        if proof.loss:
            page.notes.append(Note(name, "", _shorten(proof.loss)))
            continue
        shape = read_language_config(work / name)

        def note(*about: str, text: str, name: str = name, kind: str = shape.model_type) -> None:
            of_any = text.replace(f" a {kind} model", " such a model").replace(f" {kind} ", " ")
            page.notes.append(Note(name, ", ".join(about), _shorten(of_any)))

        is_mixture_of_experts = has_experts(shape)
        for method in (m for m in methods if is_mixture_of_experts or m != "experts"):
            nowhere = {
                layout: "-" if is_mixture_of_experts or "expert" not in layout else ""
                for layout in LAYOUTS
            }
            row = [cells.get((name, method, layout), nowhere[layout]) for layout in LAYOUTS]
            for layout, text in zip(LAYOUTS, row, strict=True):
                if text.startswith("refused: "):
                    note(method, layout, text=text[9:])
            shown = ["-" if text.startswith("refused") else text for text in row]
            page.rows[name, method] = ["no" if proof.packing else "yes", *shown]
        for layout in ("tensor", "pipeline"):
            if why := _find_refusal(name, proof, layout, work / name):
                note(layout, text=why)
        if proof.adapters:
            note("qlora", text=proof.adapters)
        if proof.packing:
            note("packed", text=proof.packing)
    return page


def _shorten(text: str) -> str:
    first = text.strip().split("\n")[0].rstrip(".")
    return f"{first if len(first) < 220 else first[:217] + '..'}."


if __name__ == "__main__":
    sys.exit(main())
