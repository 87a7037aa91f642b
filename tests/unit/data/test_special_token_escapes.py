"""Typed special tokens are found as a plain list of alternatives finds them."""

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_tune.data.answers import ESCAPE, SpecialTokenEscapes
from hpc_tune.data.counts import Counters

WORDS = st.text("ab|<", max_size=5)


@settings(deadline=None, database=None)
@given(st.lists(WORDS, max_size=8), st.text(f"ab|<{ESCAPE}\U000f0001", max_size=60))
def test_any_text_comes_back_with_the_longest_special_token_at_each_place(controls, text):
    counters = Counters()
    stand_ins = SpecialTokenEscapes(controls, controls, counters)
    pieces = [*stand_ins.split(stand_ins.hide_special_tokens(text))]
    assert "".join(typed or piece for piece, typed in pieces) == text
    longest_first = sorted({ESCAPE, *filter(None, controls)}, key=len, reverse=True)
    plain = re.findall("|".join(map(re.escape, longest_first)), text)
    assert [typed for _, typed in pieces if typed] == plain
    assert counters.control_texts == len([typed for typed in plain if typed != ESCAPE])
