"""lm-evaluation-harness scores a merged model, as docs/lm-eval.md says: beside transformers."""

import json
import os
import subprocess

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.docs import DOCS, commands_of, files_of
from tests.support.ranks import ROOT, python, rank_environment, run_ranks
from tests.support.training import train

HARNESS = ROOT / ".lm-eval" / "bin" / "lm_eval"
LIMIT_S = 300.0
QUESTIONS = [
    {"question": f"def {name}({argument}):\n    return", "choices": choices, "answer": n % 2}
    for n, (name, argument, choices) in enumerate(
        (name, argument, [f"{argument}.{name}()", f"not {argument}"])
        for name in ("open", "read", "close", "join", "split", "copy")
        for argument in ("self", "path")
    )
]


def scored_by_transformers(model, rows):
    """The share of questions whose right choice is the most likely one; a space comes before it."""
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model)

    def likelihood(question, choice):
        prompt = tokenizer(question, add_special_tokens=False)["input_ids"]
        whole = tokenizer(f"{question} {choice}", add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            log_p = lm(torch.tensor([whole])).logits[0].log_softmax(-1)
        places = range(len(prompt), len(whole))
        return sum(log_p[at - 1, whole[at]].item() for at in places)

    right = 0
    for row in rows:
        scores = [likelihood(row["question"], choice) for choice in row["choices"]]
        right += scores.index(max(scores)) == row["answer"]
    return right / len(rows)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_harness_scores_a_merged_model_as_transformers_does(tmp_path):
    if not HARNESS.exists():
        pytest.skip("lm-evaluation-harness is not installed (make harness)")
    run, merged = tmp_path / "run", tmp_path / "merged"
    words = ["data.path=builtin:pydocs:heldout", "data.eval_path=null", "tune.method=lora"]
    done = train([*words, "train.max_steps=2", f"run.dir={run}"])
    assert done.returncode == 0, done.stderr
    words = ["-m", "hpc_tune", "export", str(run), "--to", "merged", "--out", str(merged)]
    assert run_ranks([*python(), *words], rank_environment(1), LIMIT_S).returncode == 0
    for name, text in files_of(commands_of(DOCS / "lm-eval.md")).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    lines = [json.dumps(row) + "\n" for row in QUESTIONS]
    (tmp_path / "tasks" / "mine.jsonl").write_text("".join(lines))
    words = ["--model", "hf", "--model_args", f"pretrained={merged},dtype=float32"]
    words += ["--include_path", "tasks", "--tasks", "mine", "--device", "cpu"]
    offline = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    scored = subprocess.run(
        [HARNESS, *words, "--output_path", "scores"],
        cwd=tmp_path,
        env=os.environ | offline,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert scored.returncode == 0, scored.stderr
    [file] = (tmp_path / "scores").rglob("results*.json")
    score = json.loads(file.read_text())["results"]["mine"]["acc,none"]
    assert score == pytest.approx(scored_by_transformers(merged, QUESTIONS), abs=1e-6)
