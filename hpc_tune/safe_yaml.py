"""Read the YAML that people write, by PyYAML's safe loader, and refuse duplicate keys.

No value becomes a Python object, and no text may expand to more values than a machine can hold.
"""

import math
from typing import Any

import yaml

_MERGE_TAG = "tag:yaml.org,2002:merge"
_MAX_VALUES, _MAX_LEVELS = 100_000, 30
_REFUSED_TAGS = ("binary", "set", "omap", "pairs")  # neither text, number, list nor mapping
# Raised by constructors of the safe loader for a value that does not fit its tag.
_CONSTRUCTOR_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


class _Loader(yaml.SafeLoader):
    """Refuses a mapping with two equal keys; the safe loader would use the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys = set()
        for key, _ in node.value:
            if (key.tag, str(key.value)) in keys and key.tag != _MERGE_TAG:
                problem = f"duplicate key {key.value}"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            keys.add((key.tag, str(key.value)))
        return node

    def get_single_node(self) -> Any:
        node = super().get_single_node()
        if node is not None and _num_values(node, {}, 0) > _MAX_VALUES:
            problem = f"it expands to over {_MAX_VALUES:,} values; its aliases (*) repeat too much"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return node


_Loader.yaml_constructors = {
    tag: construct
    for tag, construct in yaml.SafeLoader.yaml_constructors.items()
    if str(tag).rpartition(":")[2] not in _REFUSED_TAGS
}


class _TextLoader(_Loader):
    """Keeps all scalars without quotes as text, except null."""


_TextLoader.yaml_implicit_resolvers = {
    first: [known for known in resolvers if known[0].endswith((":null", ":merge"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _num_values(node: Any, num_by_id: dict[int, float], level: int) -> float:
    """Return how many values a node expands to; infinity if it contains itself."""
    if level > _MAX_LEVELS:
        raise RecursionError
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in num_by_id:
        num_by_id[id(node)] = math.inf
        pairs = isinstance(node, yaml.MappingNode)
        children = [part for pair in node.value for part in pair] if pairs else node.value
        num_by_id[id(node)] = 1 + sum(_num_values(part, num_by_id, level + 1) for part in children)
    return num_by_id[id(node)]


def load_yaml(text: str, scalars_as_text: bool = False) -> Any:
    """Return the value of a YAML text; with ``scalars_as_text`` all scalars except null are text.

    Raises:
        ValueError: if it is not YAML, has a duplicate key, or is too large or too deep; the message
            is one line, with the position if known.
    """
    try:
        return yaml.load(text, _TextLoader if scalars_as_text else _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        position = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise ValueError(f"{error.problem or error.context}{position}") from None
    except yaml.YAMLError as error:  # a character that YAML does not allow
        raise ValueError(str(error).splitlines()[0]) from None
    except RecursionError:
        raise ValueError(f"nested in more than {_MAX_LEVELS} levels") from None
    except _CONSTRUCTOR_ERRORS as error:
        raise ValueError(f"a value does not fit its type ({error})") from None
