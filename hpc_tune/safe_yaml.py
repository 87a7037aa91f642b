"""Reads the YAML that people write: by PyYAML's safe loader, and with no key given twice."""

from typing import Any

import yaml

_MERGE = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """Refuses a mapping with two equal keys, of which the safe loader takes the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys = set()
        for key, _ in node.value:
            if (key.tag, str(key.value)) in keys and key.tag != _MERGE:
                problem = f"duplicate key {key.value}"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            keys.add((key.tag, str(key.value)))
        return node


class _TextLoader(_Loader):
    """Leaves everything that has no quotes as it is written, except null."""


_TextLoader.yaml_implicit_resolvers = {
    first: [known for known in resolvers if known[0].endswith((":null", ":merge"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def load_yaml(text: str, as_text: bool = False) -> Any:
    """Return the value of a YAML text, or with ``as_text`` all its scalars but null as text.

    Raises:
        ValueError: if it is not YAML, or has a key twice; in one line, with the place.
    """
    try:
        return yaml.load(text, _TextLoader if as_text else _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise ValueError(f"{error.problem or error.context}{place}") from None
    except yaml.YAMLError as error:  # a character that YAML does not allow
        raise ValueError(str(error).splitlines()[0]) from None
