"""Print a completion script. Commands, options and choices are in it; experiments, settings with their values and
environments are asked for once per shell (`rl-lab completion words`), and runs are read from ./runs.

examples:
  eval "$(rl-lab completion bash)"                                    this shell; or put the line into ~/.bashrc
  eval "$(rl-lab completion zsh)"                                     after compinit, in ~/.zshrc
  rl-lab completion fish > ~/.config/fish/completions/rl-lab.fish
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rl_lab.cli.parsing import argument

FREE_WORDS = {  # shown so in a usage line -> the shell function that lists them
    "RUN": "runs",
    "EXPERIMENT": "experiments",
    "key=value": "settings",
    "FILTER | show ID | check ID": "environments",
}
OPTION_WORDS = {"--env": "environments", "--algorithm": "algorithms"}


@dataclass(frozen=True)
class Option:
    """One option of a command: every spelling, what it may be given, and its help."""

    spellings: tuple[str, ...]
    takes_value: bool
    choices: tuple[str, ...]
    help: str

    @property
    def free(self) -> str:
        """Which shell function lists what it may be given."""
        return next((OPTION_WORDS[spelling] for spelling in self.spellings if spelling in OPTION_WORDS), "")


@dataclass(frozen=True)
class CommandWords:
    """Everything that may be completed after `rl-lab NAME`."""

    name: str
    summary: str
    options: tuple[Option, ...]
    words: tuple[str, ...]  # fixed first words: `show`, `check`
    free: tuple[str, ...]  # the shell functions that list what else may stand there

    @property
    def flags(self) -> list[str]:
        return [spelling for option in self.options for spelling in option.spellings]


def describe_commands() -> list[CommandWords]:
    """Ask every command's parser what it understands."""
    from rl_lab.cli.main import SUMMARIES, command_module, parser_of

    described = []
    for name, summary in SUMMARIES.items():
        actions = list(_actions(parser_of(name)))
        options = {option.spellings: option for option in map(_option, actions) if option.spellings}
        positional = [action for action in actions if not action.option_strings]
        choices = [str(choice) for action in positional for choice in action.choices or ()]
        words = (*getattr(command_module(name), "ACTIONS", ()), *choices)
        shown = [str(action.metavar) for action in positional]
        listed = [FREE_WORDS.get(each) or FREE_WORDS.get(each.split(" ")[0]) for each in shown]
        free = tuple(dict.fromkeys(each for each in listed if each))
        described.append(CommandWords(name, summary, tuple(options.values()), words, free))
    return described


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """What a parser and those of its actions understand."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from _actions(child)
        else:
            yield action


def _option(action: argparse.Action) -> Option:
    help_line = (action.help or "").replace("%(default)s", str(action.default))
    choices = tuple(str(choice) for choice in action.choices or ())
    return Option(tuple(action.option_strings), action.nargs != 0, choices, help_line)


# --- bash --------------------------------------------------------------------------------------

# bash splits words at `=` and `:`, so what stands before the last of them is taken away from what it offers.
BASH = r"""# bash completion for rl-lab; made by `rl-lab completion bash`
_rl_lab_experiments() {
    [[ -n ${_RL_LAB_EXPERIMENTS+set} ]] || _RL_LAB_EXPERIMENTS=$(rl-lab completion words 2>/dev/null)
    printf '%s\n' "$_RL_LAB_EXPERIMENTS"
}
_rl_lab_settings() { _rl_lab_experiments | grep =; }
_rl_lab_environments() { _rl_lab_experiments | grep -E '^[^:=]+-v[0-9]+$'; }
_rl_lab_algorithms() { _rl_lab_experiments | sed -n 's/^algorithm=//p'; }
_rl_lab_runs() {
    local directory
    printf '%s\n' @last @best
    for directory in runs/*/; do [[ -e $directory/config.yaml ]] && basename "$directory"; done
}
_rl_lab() {
    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} words="" line="" head kept=()
    COMPREPLY=()
    [[ -n ${COMP_LINE-} ]] && line=${COMP_LINE:0:COMP_POINT} && current=${line##* }
    if [[ $COMP_CWORD -eq 1 ]]; then
        COMPREPLY=($(compgen -W "@COMMANDS@ --help --version" -- "$current"))
        return
    fi
    case "${COMP_WORDS[1]} $previous" in
@CHOICES@
        *) case "${COMP_WORDS[1]}" in
@WORDS@
        esac ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    if [[ -n $line ]]; then
        head=${current%"${current##*[=:]}"}
        for words in "${COMPREPLY[@]}"; do [[ $words == "$head" ]] || kept+=("${words#"$head"}"); done
        COMPREPLY=("${kept[@]}")
    fi
    [[ ${COMPREPLY[0]-} == *= ]] && compopt -o nospace 2>/dev/null
    return 0
}
complete -o default -F _rl_lab rl-lab
"""


def bash_script(commands: list[CommandWords]) -> str:
    choices = _for_choices(
        commands,
        lambda words, values: f'        "{words}") words="{values}" ;;',
        lambda words, free: f'        "{words}") words="$(_rl_lab_{free})" ;;',
    )
    words = []
    for command in commands:
        free = "".join(f" $(_rl_lab_{each})" for each in command.free)
        fixed = " ".join([*command.words, *command.flags])
        words.append(f'            {command.name}) words="{fixed}{free}" ;;')
    names = " ".join(command.name for command in commands)
    return _fill(BASH, COMMANDS=names, CHOICES=choices, WORDS="\n".join(words))


# --- zsh ---------------------------------------------------------------------------------------

ZSH = r"""#compdef rl-lab
# zsh completion for rl-lab; made by `rl-lab completion zsh`
_rl_lab_words() {
    (( ${+_rl_lab_names} )) || typeset -ga _rl_lab_names=(${(f)"$(rl-lab completion words 2>/dev/null)"})
}
_rl_lab_experiments() {
    _rl_lab_words
    compadd -- ${_rl_lab_names:#*=}
    compadd -S '' -- ${(M)_rl_lab_names:#*=}
}
_rl_lab_settings() {
    _rl_lab_words
    compadd -- ${(M)_rl_lab_names:#*=?*}
    compadd -S '' -- ${(M)_rl_lab_names:#*=}
}
_rl_lab_environments() {
    _rl_lab_words
    compadd -- ${${(M)_rl_lab_names:#*-v<->}:#*[:=]*}
}
_rl_lab_algorithms() {
    _rl_lab_words
    compadd -- ${${(M)_rl_lab_names:#algorithm=*}#algorithm=}
}
_rl_lab_runs() {
    local -a names=(@last @best runs/*/config.yaml(N:h:t))
    compadd -a names
}
_rl_lab() {
    local -a commands=(
@COMMANDS@
    )
    if (( CURRENT == 2 )); then
        _describe 'command' commands
        return
    fi
    local -a options
    case "$words[2] $words[CURRENT-1]" in
@CHOICES@
    esac
    case "$words[2]" in
@WORDS@
    esac
    _describe -o 'option' options
    _files
}
compdef _rl_lab rl-lab
"""


def zsh_script(commands: list[CommandWords]) -> str:
    names = "\n".join(f"        {_quoted(f'{command.name}:{command.summary}')}" for command in commands)
    choices = _for_choices(
        commands,
        lambda words, values: f"        {_quoted(words)}) compadd -- {values}; return ;;",
        lambda words, free: f"        {_quoted(words)}) _rl_lab_{free}; return ;;",
    )
    words = []
    for command in commands:
        options = " ".join(
            _quoted(f"{spelling}:{option.help}") for option in command.options for spelling in option.spellings
        )
        fixed = f"compadd -- {' '.join(command.words)}; " if command.words else ""
        free = "".join(f"_rl_lab_{each}; " for each in command.free)
        words.append(f"        {command.name}) {fixed}{free}options=({options}) ;;")
    return _fill(ZSH, COMMANDS=names, CHOICES=choices, WORDS="\n".join(words))


# --- fish --------------------------------------------------------------------------------------

FISH = r"""# fish completion for rl-lab; made by `rl-lab completion fish`
function __rl_lab_experiments
    set -q __rl_lab_experiment_names; or set -g __rl_lab_experiment_names (rl-lab completion words 2>/dev/null)
    printf '%s\n' $__rl_lab_experiment_names
end
function __rl_lab_settings
    __rl_lab_experiments | string match '*=*'
end
function __rl_lab_environments
    __rl_lab_experiments | string match -r '^[^:=]+-v[0-9]+$'
end
function __rl_lab_algorithms
    __rl_lab_experiments | string replace -f 'algorithm=' ''
end
function __rl_lab_runs
    printf '%s\n' @last @best
    for file in runs/*/config.yaml
        basename (dirname $file)
    end
end
"""


def fish_script(commands: list[CommandWords]) -> str:
    lines = []
    for command in commands:
        summary = _quoted(command.summary)
        lines.append(f"complete -c rl-lab -f -n __fish_use_subcommand -a {command.name} -d {summary}")
        begin = f"complete -c rl-lab -n '__fish_seen_subcommand_from {command.name}'"
        if command.words:
            lines.append(f"{begin} -f -a {_quoted(' '.join(command.words))}")
        is_file_free = " -f" * bool({*command.free} & {"experiments", "environments"})
        lines += [f"{begin}{is_file_free} -a '(__rl_lab_{each})'" for each in command.free]
        for option in command.options:
            names = [f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.spellings]
            offered = f"(__rl_lab_{option.free})" if option.free else " ".join(option.choices)
            values = f" -x -a {_quoted(offered)}" if offered else " -r" * option.takes_value
            lines.append(f"{begin} {' '.join(names)}{values} -d {_quoted(option.help)}")
    return FISH + "\n".join(lines) + "\n"


def _for_choices(
    commands: list[CommandWords], line: Callable[[str, str], str], free_line: Callable[[str, str], str]
) -> str:
    """A line for every option whose values are known: `train --cfg`, `job`; `train --env`, `environments`."""
    return "\n".join(
        free_line(f"{command.name} {spelling}", option.free)
        if option.free
        else line(f"{command.name} {spelling}", " ".join(option.choices))
        for command in commands
        for option in command.options
        if option.choices or option.free
        for spelling in option.spellings
    )


def _fill(template: str, **blocks: str) -> str:
    for name, text in blocks.items():
        template = template.replace(f"@{name}@", text)
    return template


def _quoted(text: str) -> str:
    """Single quotes as every POSIX-like shell and fish (since 3.0, through the '"'"' idiom) read them."""
    return "'" + text.replace("'", "'\"'\"'") + "'"


SHELLS = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}
ARGUMENTS = (argument("shell", choices=[*SHELLS, "words"], help="which shell to write for; words: what it offers"),)


def run(arguments: argparse.Namespace) -> int:
    if arguments.shell == "words":
        from rl_lab.cli.completion_words import train_words

        print("\n".join(train_words()))
        return 0
    print(SHELLS[arguments.shell](describe_commands()), end="")
    return 0
