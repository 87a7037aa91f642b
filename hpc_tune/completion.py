"""Completion of commands and settings in a shell, as a script that the shell reads once.

eval "$(hpc_tune completion bash)"
"""

from collections.abc import Iterable

from hpc_tune.config.load import describe_fields
from hpc_tune.errors import ConfigError

SHELLS = ("bash", "zsh")
_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"
# bash gives key=value as three words, and wants only what follows the sign.
_SCRIPT = """_hpc_tune() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" key
    COMPREPLY=()
    if [ "$word" = "=" ]; then key="$before"; word=""
    elif [ "$before" = "=" ]; then key="${{COMP_WORDS[COMP_CWORD-2]}}"
    fi
    case "$key" in
        "") ;;
{choices}
        *) COMPREPLY=($(compgen -f -- "$word")); return ;;
    esac
    case "$before" in
        --config|--out|--run|--model|inspect|export|report|watch|show)
            COMPREPLY=($(compgen -f -- "$word")); return ;;
    esac
    if [ "$COMP_CWORD" = 1 ]; then
        COMPREPLY=($(compgen -W "{commands} --help --version" -- "$word"))
    fi
    COMPREPLY+=($(compgen -W "--config --help" -- "$word"))
    local settings=($(compgen -W "{settings}" -- "$word"))
    if [ ${{#settings[@]}} -gt 0 ]; then
        COMPREPLY+=("${{settings[@]}}")
        [ ${{#COMPREPLY[@]}} = 1 ] && compopt -o nospace 2> /dev/null
    fi
}}
complete -F _hpc_tune hpc_tune
"""


def script(shell: str, commands: Iterable[str]) -> str:
    """Return the script for a shell.

    Raises:
        ConfigError: if there is none for it.
    """
    if shell not in SHELLS:
        raise ConfigError(f"completion {shell}: expected {' or '.join(SHELLS)}")
    fields = list(describe_fields())
    choices = []
    for name, kind, _, _ in fields:
        values = "true false" if kind == "bool" else " ".join(_words(kind))
        if values:
            words = f'COMPREPLY=($(compgen -W "{values}" -- "$word")); return'
            choices.append(f"        {name}) {words} ;;")
    text = _SCRIPT.format(
        choices="\n".join(choices),
        commands=" ".join(commands),
        settings=" ".join(f"{name}=" for name, *_ in fields),
    )
    return (_ZSH if shell == "zsh" else "") + text


def _words(kind: str) -> list[str]:
    """Return the words among what a field may be; a field of one kind has none."""
    words = kind.split(" | ")
    found = [word for word in words if word not in ("int", "str", "float") and "[" not in word]
    return found if len(words) > 1 else []
