"""What transformers lacks, or does otherwise, in some of the versions that hpc_tune runs on.

    from 5.23   an operator for the gradient of products grouped by expert (``sorted_rows.py``)
    from 5.21   families that cap attention's scores (Gemma 2, VaultGemma) take no SDPA, which
                leaves the cap out; before, they do
                Bloom's masks know where documents begin; before, a trial finds that they do not
    from 5.20   experts with a norm behind them (``grouped_experts.py``)
    from 5.18   LongCat stores one number of its blocks; before, two (``plan/shape.py``)
                Doge's masks are causal; before, a trial refuses it

torch's are in ``hpc_tune/torch_versions.py``.
"""

from typing import Any

from hpc_tune.packages import parse_release

_CAPS_OR_SDPA = (5, 21)


def keep_capped_scores(model: Any) -> None:
    """Let a model whose attention's scores are capped not compute them by SDPA, without the cap."""
    from transformers import __version__ as version  # it is imported: the model is its own

    cap = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    if (
        cap
        and parse_release(version) < _CAPS_OR_SDPA
        and model.config._attn_implementation == "sdpa"
    ):
        model.set_attn_implementation("eager")
