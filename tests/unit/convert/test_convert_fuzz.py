"""Any value below any key of another config: it is converted, or one message says why not."""

import yaml
from hypothesis import strategies as st

from hpc_tune.convert.axolotl import AXOLOTL
from hpc_tune.convert.convert import convert_file
from hpc_tune.convert.llama_factory import LLAMA_FACTORY
from hpc_tune.convert.torchtune import TORCHTUNE
from hpc_tune.errors import ConfigError
from tests.support.fuzz import JSON, fuzz, said

BASES = (
    (TORCHTUNE, {"model": {"_component_": "t.lora_x"}, "optimizer": {"_component_": "t.AdamW"}}),
    (LLAMA_FACTORY, {"model_name_or_path": "/m", "stage": "sft"}),
    (AXOLOTL, {"base_model": "/m", "datasets": [{"path": "a.jsonl"}]}),
)
VALUES = JSON | st.sampled_from(["/d/a.jsonl", "${seed}", ["q_proj"], [{"path": "b.csv"}], "1e-4"])


def configs(pair):
    tool, base = pair
    values = st.dictionaries(st.sampled_from(sorted(tool.rules)), VALUES, max_size=4)
    return st.tuples(st.just(base), values)


def merged(base, values):
    """Put values into a config by dotted key, where nothing else is in the way."""
    tree = yaml.safe_load(yaml.safe_dump(base))
    for key, value in values.items():
        *parts, name = key.removesuffix(".*").split(".")
        part = tree
        for step in parts:
            part = part[0] if isinstance(part, list) and part else part
            part = part.setdefault(step, {}) if isinstance(part, dict) else None
        part = part[0] if isinstance(part, list) and part else part
        if isinstance(part, dict):
            part[name] = value
    return tree


OTHER = st.tuples(st.just({}), st.dictionaries(st.text(max_size=6), JSON, max_size=3))


@fuzz(st.sampled_from(BASES).flatmap(configs) | OTHER)
def test_configs_of_other_tools(folder, drawn):
    source, out = folder / "theirs.yaml", folder / "ours.yaml"
    source.write_text(yaml.safe_dump(merged(*drawn)))
    try:
        lines, text = convert_file(source, 2, out)
    except ConfigError as error:
        said(error)
        assert not out.exists()
        return
    assert lines[0].startswith("recognized")
    assert out.read_text() == text
