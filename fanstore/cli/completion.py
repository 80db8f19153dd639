"""Shell completion for all commands, made from their argument parsers.

Owns the scripts for bash and zsh. What can stand for a value follows from its choices, or from its METAVAR (_KINDS).
Why not a library: docs/dependencies.md. Used by cli/fanstore.py; pure functions.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping

from fanstore.prefetch.specification import MODES

SHELLS = ("bash", "zsh")

#: What a value is, by how the help names it; all others are the user's to know (a size, a number).
_KINDS = {
    "DIR": "directory",
    "PREPARED": "directory",
    "OUT": "directory",
    "SRC": "file",
    "FILE": "file",
    "PATH": "file",
    "NAME|FILE": "file",
    "PREPARED|SRC": "file",
    "MOUNTPOINT": "directory",
    "ORDER": "order",
}
#: Commands whose MOUNTPOINT is mounted already.
_OF_MOUNTS = ("fanstore-umount", "fanstore-stat", "fanstore-run")
#: Commands that run another one behind ``--``.
_WITH_COMMAND = ("fanstore-mount",)

_ZSH_KINDS = {
    "order": "_fanstore_orders",
    "directory": "_files -/",
    "file": "_files",
    "mount": "_fanstore_mounts",
    "nothing": " ",
}


def script(shell: str, parsers: Mapping[str, argparse.ArgumentParser], commands: Mapping[str, str]) -> str:
    """The script for a shell; ``commands`` are those of ``fanstore COMMAND`` and what they do."""
    return _bash(parsers, commands) if shell == "bash" else _zsh(parsers, commands)


def _options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.option_strings]


def _positionals(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [
        action
        for action in parser._actions
        if not action.option_strings and not isinstance(action, argparse._SubParsersAction)
    ]


def _kind(program: str, action: argparse.Action) -> str:
    if action.metavar == "MOUNTPOINT" and program in _OF_MOUNTS:
        return "mount"
    return _KINDS.get(str(action.metavar), "nothing")


def _subcommands(parser: argparse.ArgumentParser) -> dict[str, str]:
    """What each of them does."""
    actions = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return {choice.dest: choice.help or "" for action in actions for choice in action._choices_actions}


def _groups(parsers: Mapping[str, argparse.ArgumentParser]) -> list[str]:
    """Programs that have subcommands, besides ``fanstore`` itself."""
    return [program for program, parser in parsers.items() if program != "fanstore" and _subcommands(parser)]


def _programs(parsers: Mapping[str, argparse.ArgumentParser]) -> str:
    """What can be typed: not the subcommands, which are known by the names of their manual pages."""
    groups = tuple(f"{group}-" for group in _groups(parsers))
    return " ".join(program for program in parsers if not program.startswith(groups))


def _takes_value(action: argparse.Action) -> bool:
    return action.nargs != 0


# --- bash ---

_BASH_HEAD = """\
# bash completion for FanStore. In this shell: eval "$(fanstore completion bash)"
# For all that are started later, the same line in ~/.bashrc, or this file as
# ~/.local/share/bash-completion/completions/fanstore (and links to it named fanstore-mount and so on).

# What is known of a command ($1) and of the value of one of its options ($2): sets options, kind and rest.
_fanstore_describe() {
    options='' kind=positional rest=nothing
    case $1 in
"""

_BASH_TAIL = """\
    esac
}

_fanstore_offer() { # KIND WORD: sets COMPREPLY
    case $1 in
        directory) compopt -o filenames 2>/dev/null; mapfile -t COMPREPLY < <(compgen -d -- "$2") ;;
        file) compopt -o filenames 2>/dev/null; mapfile -t COMPREPLY < <(compgen -f -- "$2") ;;
        mount)
            local point rest points=()
            while read -r _ _ _ _ point rest; do
                [[ $rest == *' - fuse.fanstore '* ]] && points+=("$(printf '%b' "$point")")
            done </proc/self/mountinfo
            compopt -o filenames 2>/dev/null
            for point in "${points[@]}"; do [[ $point == "$2"* ]] && COMPREPLY+=("$point"); done
            ((${#COMPREPLY[@]})) || mapfile -t COMPREPLY < <(compgen -d -- "$2")
            ;;
        order) mapfile -t COMPREPLY < <(compgen -W "@MODES@" -- "$2"; compgen -f -- "$2") ;;
        words:*) mapfile -t COMPREPLY < <(compgen -W "${1#words:}" -- "$2") ;;
    esac
}

_fanstore() {
    local command=${1##*/} start=1 i options kind rest
    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]}
    COMPREPLY=()
    if [[ $command == fanstore ]]; then
        if ((COMP_CWORD == 1)); then
            _fanstore_offer "words:@COMMANDS@ completion --help --version" "$word"
            return
        fi
        command=fanstore-${COMP_WORDS[1]} start=2
    fi
    case $command in
        @GROUPS@) if ((COMP_CWORD > start)); then command+=-${COMP_WORDS[start]}; ((start++)); fi ;;
    esac
    for ((i = start; i < COMP_CWORD; i++)); do
        [[ ${COMP_WORDS[i]} == -- ]] || continue
        # The COMMAND completes as it does elsewhere, where bash knows how.
        if declare -F _command_offset >/dev/null; then _command_offset $((i + 1))
        elif ((i + 1 == COMP_CWORD)); then mapfile -t COMPREPLY < <(compgen -c -- "$word")
        else _fanstore_offer file "$word"; fi
        return
    done
    # bash cuts --option=value into three words.
    if [[ $word == = ]]; then word=''
    elif [[ $before == = ]]; then before=${COMP_WORDS[COMP_CWORD - 2]}; fi
    _fanstore_describe "$command" "$before"
    if [[ $kind != positional ]]; then _fanstore_offer "$kind" "$word"
    elif [[ $word == -* ]]; then _fanstore_offer "words:$options" "$word"
    else _fanstore_offer "$rest" "$word"; fi
}

complete -F _fanstore @PROGRAMS@
"""


def _bash(parsers: Mapping[str, argparse.ArgumentParser], commands: Mapping[str, str]) -> str:
    tail = _BASH_TAIL.replace("@COMMANDS@", " ".join(commands)).replace("@PROGRAMS@", _programs(parsers))
    tail = tail.replace("@GROUPS@", "|".join(_groups(parsers))).replace("@MODES@", " ".join(MODES))
    cases = [
        line for program, parser in parsers.items() if program != "fanstore" for line in _bash_case(program, parser)
    ]
    cases += [
        "        fanstore-completion)",
        "            options='--help'",
        f"            rest='words:{' '.join(SHELLS)}'",
        "            ;;",
    ]
    return _BASH_HEAD + "".join(f"{line}\n" for line in cases) + tail


def _bash_case(program: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    yield f"        {program})"
    names = [name for action in _options(parser) for name in action.option_strings if name.startswith("--")]
    behind = ["--"] if program in _WITH_COMMAND else []
    yield f"            options='{' '.join([*names, *behind])}'"
    yield "            case $2 in"
    for action in _options(parser):
        if _takes_value(action):
            kind = f"words:{' '.join(action.choices)}" if action.choices else _kind(program, action)
            # An option that may stand alone, too, does not forbid what else can follow.
            if action.nargs != "?":
                yield f"                {'|'.join(action.option_strings)}) kind='{kind}' ;;"
    yield "            esac"
    kinds = [_kind(program, action) for action in _positionals(parser)]
    # SRC may be a file, and then OUT is completed as one as well: bash shows what is there.
    if kinds:
        yield f"            rest={'file' if 'file' in kinds else kinds[0]}"
    elif _subcommands(parser):
        yield f"            rest='words:{' '.join(_subcommands(parser))}'"
    yield "            ;;"


# --- zsh ---

_ZSH_HEAD = """\
#compdef @PROGRAMS@
# zsh completion for FanStore. In this shell, after compinit: eval "$(fanstore completion zsh)"
# For all that are started later, the same line in ~/.zshrc, or this file as _fanstore in a directory of fpath.

_fanstore_mounts() {
    local -a points
    points=(${(f)"$(awk '/ - fuse.fanstore /{print $5}' /proc/self/mountinfo)"})
    if (( $#points )); then compadd -f -a points; else _files -/; fi
}

_fanstore_orders() {
    _alternative 'words:word:(@MODES@)' 'files:file:_files'
}
"""

_ZSH_TAIL = """
_fanstore() {
    local state line
    local -a commands
    if [[ $service != fanstore ]]; then
        _fanstore_$service
        return
    fi
    commands=(@COMMANDS@)
    _arguments -C '--help[show help and end]' '--version[show the versions of everything]' \\
        '1:command:->command' '*::argument:->arguments'
    case $state in
        command) _describe command commands ;;
        arguments)
            if (( $+functions[_fanstore_fanstore-$words[1]] )); then _fanstore_fanstore-$words[1]
            elif [[ $words[1] == completion ]]; then _arguments '1:shell:(@SHELLS@)'; fi
            ;;
    esac
}

if [[ $funcstack[1] == _fanstore ]]; then _fanstore "$@"; else compdef _fanstore @PROGRAMS@; fi
"""


def _zsh(parsers: Mapping[str, argparse.ArgumentParser], commands: Mapping[str, str]) -> str:
    described = {**commands, "completion": "print shell completion for all commands"}
    words = " ".join(_quote(f"{name}:{_escape(summary)}") for name, summary in described.items())
    programs = _programs(parsers)
    functions = [
        line for program, parser in parsers.items() if program != "fanstore" for line in _zsh_function(program, parser)
    ]
    tail = _ZSH_TAIL.replace("@COMMANDS@", words).replace("@SHELLS@", " ".join(SHELLS)).replace("@PROGRAMS@", programs)
    head = _ZSH_HEAD.replace("@PROGRAMS@", programs).replace("@MODES@", " ".join(MODES))
    return head + "".join(f"{line}\n" for line in functions) + tail


def _zsh_function(program: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    yield ""
    yield f"_fanstore_{program}() {{"
    yield "    _arguments -S \\"
    for action in _options(parser):
        text = f"[{_escape(_brief(expand_help(parser, action)))}]"
        value = ""
        if _takes_value(action):
            title = _escape(str(action.metavar or action.dest))
            kind = f"({' '.join(action.choices)})" if action.choices else _ZSH_KINDS[_kind(program, action)]
            value = f"{'::' if action.nargs == '?' else ':'}{title}:{kind}"
        for name in action.option_strings:
            repeat = "*" if isinstance(action, argparse._AppendAction) else ""
            yield f"        {_quote(repeat + name + text + value)} \\"
    for number, action in enumerate(_positionals(parser), 1):
        place = "*" if action.nargs == "+" else str(number)
        kind = _ZSH_KINDS[_kind(program, action)]
        if place == "*" or all(other.nargs != "+" for other in _positionals(parser)):
            yield f"        {_quote(f'{place}:{action.metavar}:{kind}')} \\"
    if program in _WITH_COMMAND:
        yield "        '*::command:_normal' \\"
    if subcommands := _subcommands(parser):
        yield f"        '1:command:({' '.join(subcommands)})' '*::argument:->arguments' \\"
        yield f"        && [[ $state != arguments ]] || _fanstore_{program}-$words[1]"
        yield "}"
        return
    yield "        && return 0"
    yield "}"


def expand_help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """The help of an option as --help shows it, in one line."""
    if not action.help:
        return ""
    values = {name: value for name, value in vars(action).items() if value is not argparse.SUPPRESS}
    return " ".join((action.help % {**values, "prog": parser.prog}).split())


def _brief(text: str) -> str:
    """The first clause: one line of a menu."""
    return re.split(r"; |: | \(|\. ", text)[0]


def _escape(text: str) -> str:
    """For zsh, where brackets and colons separate the parts of a description."""
    for character in "\\[]:":
        text = text.replace(character, f"\\{character}")
    return text


def _quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
