"""Shell completion of commands, their arguments and settings: a script that the shell sources.

eval "$(hpc_tune completion bash)"
"""

from collections.abc import Mapping, Sequence
from typing import Any

from hpc_tune.config.chat_templates import NAMED_TEMPLATES
from hpc_tune.config.load import describe_fields

SHELLS = ("bash", "zsh")
_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"
# bash splits key=value into three words, and completes only the part after the sign.
_SCRIPT = """_hpc_tune() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" command=train
    local settings="{settings}" words="" files=""
    if [ "$COMP_CWORD" -gt 1 ]; then
        case "${{COMP_WORDS[1]}}" in {commands}) command="${{COMP_WORDS[1]}}" ;; esac
    fi
    if [ "$word" = "=" ]; then word="" before="$before="
    elif [ "$before" = "=" ]; then before="${{COMP_WORDS[COMP_CWORD-2]}}="
    fi
    case "$command $before" in
{values}
        *=) files=1 ;;
        *)
            case "$command" in
{arguments}
            esac
            [ "$COMP_CWORD" = 1 ] && words="$words {names} --version" ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    [ -n "$files" ] && COMPREPLY+=($(compgen -f -- "$word"))
    case "${{COMPREPLY[*]}}" in *" "*) ;; *=) compopt -o nospace 2> /dev/null ;; esac
}}
complete -F _hpc_tune hpc_tune
"""


def completion_script(shell: str, commands: Mapping[str, Any]) -> str:
    """Return the script for a shell, from the arguments that the ``commands`` declare."""
    fields, values, arguments = list(describe_fields()), [], []
    for name, kind, _, _ in fields:
        words = _literal_values(kind.replace("bool", "true | false"))
        is_template = name == "data.chat_template"
        words = [*NAMED_TEMPLATES] if is_template else words
        values += [_case(f'*" {name}="', words, files=is_template)] if words else []
    for command, (_, declared) in commands.items():
        words, takes_files = ["--help"], False
        for name, kwargs in declared:
            choices = kwargs.get("choices", ())
            if name == "settings":
                words.append("$settings")
            elif not name.startswith("-"):
                words, takes_files = [*words, *choices], not choices
            else:
                words.append(name)
                if "action" not in kwargs or kwargs["action"] == "append":
                    values.append(_case(f'"{command} {name}"', choices, files=not choices))
        arguments.append("        " + _case(command, words, takes_files))
    return (_ZSH if shell == "zsh" else "") + _SCRIPT.format(
        settings=" ".join(f"{name}=" for name, *_ in fields),
        names=" ".join(commands),
        commands="|".join(commands),
        values="\n".join(values),
        arguments="\n".join(arguments),
    )


def _case(pattern: str, words: Sequence[str], files: bool) -> str:
    return f'        {pattern}) words="{" ".join(words)}" files={"1" if files else ""} ;;'


def _literal_values(kind: str) -> list[str]:
    """Return the literal values of a field's type; a field of one type has none."""
    types = [] if kind.startswith("list[") else kind.split(" | ")
    literals = [text for text in types if text not in ("int", "str", "float") and "[" not in text]
    return literals if len(types) > 1 else []
