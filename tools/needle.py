"""Find a fact at some depth of a long text: write rows to train on, and score a model.

    python tools/needle.py write FOLDER [--length 256] [--rows 2000] [--held-out 40] [--digits 2]
    python tools/needle.py score MODEL FOLDER

This is the passkey retrieval of Mohtashami and Jaggi (arXiv:2305.16300): meaningless filler
sentences, a line with a number among them, and a question for that number at the end. ``write``
makes train.jsonl, with uniformly drawn depths, and a file of held-out rows for each of five depths
(depth-000.jsonl is the beginning of the text, depth-100.jsonl its end), with numbers that no
training row has. Each row has its depth and its length in characters, which are the tokens of
builtin:tiny. ``score`` loads a model's folder, such as one from export --to merged, by transformers
and prints by depth how many numbers it answers completely.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DEPTHS = (0, 25, 50, 75, 100)  # percent of the filler that is before the fact
_FILLER = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.")
_ANSWER = "The pass key is {key}."
_FACT, _QUESTION = f"{_ANSWER} Remember it. {{key}} is the pass key.", "What is the pass key?"


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    write = commands.add_parser("write")
    write.add_argument("folder", type=Path)
    for name, default in (("length", 256), ("rows", 2000), ("held-out", 40), ("digits", 2)):
        write.add_argument(f"--{name}", type=int, default=default)
    score = commands.add_parser("score")
    score.add_argument("model", type=Path)
    score.add_argument("folder", type=Path)
    asked = parser.parse_args()
    if asked.command == "score":
        for depth, right, total in score_by_depth(asked.model, asked.folder):
            print(f"depth {depth:3}%: {right} of {total} right")
        return
    write_rows(asked.folder, asked.length, asked.rows, asked.held_out, asked.digits)


def write_rows(folder: Path, length: int, rows: int, held_out: int, digits: int) -> None:
    """Write train.jsonl and depth-*.jsonl into ``folder``: ``held_out`` rows for each depth."""
    draw = random.Random(0)
    keys = [f"{number:0{digits}}" for number in range(10**digits)]
    draw.shuffle(keys)
    kept, learned = keys[: len(keys) // 5], keys[len(keys) // 5 :]
    folder.mkdir(parents=True, exist_ok=True)
    made = [make_row(draw, length, draw.choice(learned), 100 * draw.random()) for _ in range(rows)]
    _write(folder / "train.jsonl", made)
    for depth in DEPTHS:
        made = [make_row(draw, length, draw.choice(kept), depth) for _ in range(held_out)]
        _write(folder / f"depth-{depth:03}.jsonl", made)


def make_row(draw: random.Random, length: int, key: str, depth: float) -> dict[str, Any]:
    """Return a row of at most ``length`` characters, with the fact at ``depth`` percent of it."""
    fact, filler = _FACT.format(key=key), []
    left = length - len(f"{fact} {_QUESTION}")
    while left > len(sentence := draw.choice(_FILLER)):
        filler.append(sentence)
        left -= len(sentence) + 1
    filler.insert(round(len(filler) * depth / 100), fact)
    prompt = " ".join([*filler, _QUESTION])
    answer = _ANSWER.format(key=key)
    return {"prompt": prompt, "completion": answer, "depth": round(depth), "length": len(prompt)}


def _write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def score_by_depth(model: Path, folder: Path) -> Iterator[tuple[int, int, int]]:
    """Yield (depth in percent, numbers that ``model`` answers completely, numbers asked for)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for depth in DEPTHS:
        rows = [json.loads(line) for line in (folder / f"depth-{depth:03}.jsonl").open()]
        right = 0
        for row in rows:
            chat = [{"role": "user", "content": row["prompt"]}]
            ids = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            new = len(tokenizer(row["completion"], add_special_tokens=False)["input_ids"])
            with torch.no_grad():
                said = lm.generate(**ids, max_new_tokens=new, min_new_tokens=new, do_sample=False)
            answer = tokenizer.decode(said[0, ids["input_ids"].shape[1] :])
            right += answer == row["completion"]
        yield depth, right, len(rows)


if __name__ == "__main__":
    main()
