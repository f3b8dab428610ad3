"""`completion`: scripts that parse, and a bash that completes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rl_lab.cli.completion import describe_commands
from rl_lab.cli.main import SUMMARIES

ASK = """
source "$1"
rl-lab() { printf 'ppo_cartpole\\nppo_acrobot\\n'; }
ask() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _rl_lab; echo "${COMPREPLY[@]}"; }
cd "$2"
ask rl-lab tr
ask rl-lab train ppo_c
ask rl-lab train --run
ask rl-lab resume @
ask rl-lab resume my
ask rl-lab resume --mode warm_start_
ask rl-lab envs ch
ask rl-lab config di
ask rl-lab completion z
"""


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script_parses_and_names_every_command_and_option(rl: Any, tmp_path: Path, shell: str) -> None:
    script = tmp_path / f"completion.{shell}"
    script.write_text(rl("completion", shell).out)
    text = script.read_text()
    for command in describe_commands():
        assert command.name in text
        for flag in command.flags:
            assert (flag if shell != "fish" else flag.lstrip("-")) in text
    if shutil.which(shell):
        assert subprocess.run([shell, "-n", str(script)], capture_output=True, check=False).stderr == b""


def test_bash_completes_commands_options_choices_experiments_and_runs(rl: Any, tmp_path: Path) -> None:
    script = tmp_path / "completion.bash"
    script.write_text(rl("completion", "bash").out)
    (tmp_path / "runs" / "my_run").mkdir(parents=True)
    (tmp_path / "runs" / "my_run" / "config.yaml").write_text("")
    (tmp_path / "runs" / "my_notes").mkdir()
    command = ["bash", "-c", ASK, "bash", str(script), str(tmp_path)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    assert answer.stdout.splitlines() == [
        "train",
        "ppo_cartpole",
        "--run-id --runs-dir",
        "@last @best",
        "my_run",
        "warm_start_optimizer",
        "check",
        "diff",
        "zsh",
    ]


def test_an_unknown_shell_is_refused(rl: Any) -> None:
    answer = rl("completion", "tcsh")
    assert answer.code == 2 and "'bash', 'zsh', 'fish'" in answer.err


def test_every_command_is_described() -> None:
    assert [command.name for command in describe_commands()] == list(SUMMARIES)


ASK_BASH = """
source "$1"
rl-lab() { cat "$2"; }
type() { COMP_LINE="$1"; COMP_POINT=${#1}; COMP_WORDS=($1); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _rl_lab "$2"; }
offer() { type "$1"; echo "${COMPREPLY[@]}"; }
WORDS=$2; rl-lab() { cat "$WORDS"; }
offer "rl-lab train runtime.dev"
offer "rl-lab train runtime.device="
offer "rl-lab train runtime.device=cu"
offer "rl-lab train size=12"
offer "rl-lab train total_t"
offer "rl-lab train Acrobot-v1:"
offer "rl-lab train --env Acro"
offer "rl-lab train environment.id=Acro"
offer "rl-lab train ppo_acr"
"""


def test_bash_completes_settings_values_groups_and_environments(rl: Any, tmp_path: Path) -> None:
    script, words = tmp_path / "completion.bash", tmp_path / "words"
    script.write_text(rl("completion", "bash").out)
    words.write_text(rl("completion", "words").out)
    command = ["bash", "-c", ASK_BASH, "bash", str(script), str(words)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    assert answer.stdout.splitlines() == [
        "runtime.device= runtime.device=auto runtime.device=cpu runtime.device=cuda runtime.device=cuda:1",
        "auto cpu cuda cuda:1",
        "cuda cuda:1",
        "12m",
        "total_timesteps=",
        "ppo",
        "Acrobot-v1:ppo Acrobot-v1",
        "Acrobot-v1",
        "ppo_acrobot",
    ]


def test_the_words_come_without_torch_and_at_once() -> None:
    """0.3 s of processor time for a TAB; a wall clock would measure the machine's other work."""
    code = (
        "import sys, time; from rl_lab.cli.main import main; main(['completion', 'words']);"
        "heavy = {'torch', 'numpy', 'gymnasium', 'hydra'} & {*sys.modules};"
        "print(heavy, time.process_time(), file=sys.stderr)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy, seconds = answer.stderr.strip().rsplit(" ", 1)
    assert heavy == "set()" and float(seconds) < 0.3
    words = answer.stdout.splitlines()
    assert len(words) == len(set(words)) and {"ppo_cartpole", "seed=", "memory=lstm", "lr="} <= {*words}
