"""What is wrong with the sources of a mixture is said in one message, before anything is read."""

import pytest

from hpc_tune import cli
from hpc_tune.config.load import load_config
from hpc_tune.errors import EXIT_USER_ERROR, ConfigError

A, B = "{path: a.jsonl, weight: 0.5}", "{path: b.jsonl, weight: 0.5}"


def problem(*overrides):
    with pytest.raises(ConfigError) as raised:
        load_config(None, overrides)
    assert raised.value.exit_code == 2
    return str(raised.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["data.sources=[{path: a.jsonl, weight: 0}]"], "data.sources.0.weight=0: Input should be"),
        ([f"data.sources=[{A}, {B}]", "data.path=c.jsonl"], "data.path=c.jsonl and data.sources"),
        ([f"data.sources=[{A}, {A}]"], "2 sources are called a; give each another name"),
        (
            [f"data.sources=[{A}, {{path: b.jsonl, epochs: 2}}]"],
            "a has weight, b has epochs; give weight",
        ),
        (
            ["data.sources=[{path: a.jsonl, weight: 0.5, epochs: 2}]"],
            "a has both weight and epochs; give weight",
        ),
        ([f"data.sources=[{A}, {{path: b.jsonl}}]"], "a has weight, b has neither; give weight"),
        (
            [f"data.sources=[{A}, {{path: b.jsonl, weight: 0.7}}]"],
            "the weights add up to 1.2, and as shares of the learned tokens they must add up to 1; "
            "divided by their sum they are a 0.4167, b 0.5833",
        ),
        (["data.sources=[{weight: 1}]"], "data.sources.0.path={'weight': 1}: Field required"),
        (
            ["data.sources=[{path: a.jsonl, epochs: 5}]"],
            "a has epochs=5 and max_epochs=4; lower epochs, or raise its max_epochs",
        ),
        (["data.sources=[{path: a.jsonl, epochs: 1.5}]"], "data.sources.0.epochs=1.5: "),
        (["data.sources=[{path: a.jsonl, weight: 1, limit: -3}]"], "data.sources.0.limit=-3: "),
        (["data.sources=[{path: a.jsonl, wieght: 1}]"], "did you mean data.sources.weight"),
        (["data.eval_sources=[{path: a, weight: 1}]"], "data.eval_sources.0.weight: no such key"),
        (["data.sources=[]"], "data.sources is an empty list"),
        (["data.sources=a.jsonl"], "data.sources='a.jsonl': Input should be a valid list"),
        (["data.path=null"], "data.path=null, and there are no data.sources"),
        (["data.path=[]"], "data.path is an empty list; name at least one file"),
        (["data.eval_path=[]"], "data.eval_path is an empty list; name at least one file"),
        (["data.sources=[{path: $NO_SUCH/a, weight: 1}]"], "NO_SUCH is not set in the environment"),
        (["data.sources=[{path: a.h5, weight: 1, columns: {x: text}}]"], "columns of a has no"),
        (["data.sources=[{path: [], name: a, weight: 1}]"], "a has an empty list as path"),
        (["data.sources=[{path: a, name: a b, weight: 1}]"], "data.sources.0.name='a b': "),
        (
            [f"data.sources=[{A}, {B}]", "data.eval_fraction=0.1", "data.eval_sources=[{path: c}]"],
            "data.eval_sources and data.eval_fraction=0.1 both say what is held out",
        ),
        (["data.eval_sources=[]", "data.eval_path=null"], "data.eval_sources is an empty list"),
        (["data.eval_sources=[{path: x/a}, {path: y/a}]"], "data.eval_sources: 2 sources are"),
        (["data.new_mixture=true"], "data.new_mixture=true has no effect without weights"),
        (
            ["data.sources=[{path: a.h5, weight: 1}]", "data.eval_fraction=0.1"],
            "a.h5 is prepared; give it to `prepare`",
        ),
    ],
)
def test_a_wrong_mixture_has_one_message(settings, said):
    message = problem(*settings)
    assert said in message
    assert "\n" not in message, "one message"


def test_the_command_ends_with_2_and_the_message(capsys):
    assert cli.main(["train", f"data.sources=[{A}, {A}]"]) == EXIT_USER_ERROR == 2
    assert "2 sources are called a" in capsys.readouterr().err


def test_sources_stand_in_place_of_the_default_path():
    data = load_config(None, [f"data.sources=[{A}, {B}]", "data.sources.1.loss_on=all"]).data
    assert data.path is None
    assert [(s.label, s.weight, s.loss_on) for s in data.sources] == [
        ("a", 0.5, None),
        ("b", 0.5, "all"),
    ]
    assert (
        load_config(None, ["data.sources=[{path: 'x/y-1.jsonl.gz', weight: 1}]"])
        .data.sources[0]
        .label
        == "y-1"
    )


def test_a_source_is_read_as_it_says_and_else_as_the_section_says():
    data = load_config(
        None,
        [
            "data.sources=[{path: a.jsonl, weight: 1, columns: {q: prompt}, chat_template: ./t}]",
            "data.loss_on=all",
            "data.columns={x: text}",
        ],
    ).data
    alone = data.with_source(data.sources[0])
    assert (alone.path, alone.columns, alone.chat_template, alone.loss_on, alone.sources) == (
        *("a.jsonl", {"q": "prompt"}, "./t", "all", None),
    )
