"""What a run had of each source of its mixture, and how the held-out loss of each went."""

from collections.abc import Iterator

from hpc_tune.report.read import Run

SOURCE_HEADS = (
    "source",
    "asked for",
    "learned tokens",
    "of all",
    "passes, by tokens",
    "held-out loss",
)


def source_rows(run: Run) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a table: of each source of the mixture, then of other held-out ones."""
    told = {source["name"]: source for source in run.start.get("mixture", [])}
    learned = dict.fromkeys(told, 0.0)
    for row in run.steps:
        for name, tokens in row.get("source_tokens", {}).items():
            learned[name] = learned.get(name, 0.0) + tokens
    total = sum(learned.values())
    held_out = [row["eval_losses"] for row in run.comparable_evals if row.get("eval_losses")]
    for name in dict.fromkeys([*learned, *(name for losses in held_out for name in losses)]):
        losses = [losses[name] for losses in held_out if name in losses]
        loss = f"{losses[0]:.4f} → {losses[-1]:.4f}" if losses else ""
        if name not in learned:
            yield name, "held out", "", "", "", loss
            continue
        of_pass = told.get(name, {}).get("learned_per_pass")
        yield (
            name,
            told.get(name, {}).get("asked", "not in the newest start"),
            f"{learned[name]:,.0f}",
            f"{learned[name] / total:.2%}" if total else "",
            f"{learned[name] / of_pass:.2f}" if of_pass else "",
            loss,
        )
