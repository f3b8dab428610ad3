"""`completion`: scripts that parse, and a bash that completes."""

from __future__ import annotations

import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
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
offer "rl-lab envs check Acro"
offer "rl-lab train --algorithm d"
offer "rl-lab resume my_run training.ph"
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
        "Acrobot-v1",
        "Acrobot-v1",
        "ppo_acrobot",
        "Acrobot-v1",
        "diffusion_policy dqn dreamer dreamer_v2 dreamer_v3_2023",
        "training.phases.train.duration_steps=",
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


# what is typed -> what another TAB makes of it, or what is offered
TYPED = {
    "rl-lab tr": ["train"],
    "rl-lab train ppo_acr": ["ppo_acrobot"],
    "rl-lab train --run": ["--run-id", "--runs-dir"],
    "rl-lab train total_t": ["total_timesteps="],
    "rl-lab train size=12": ["size=12m"],
    "rl-lab train runtime.device=cu": ["runtime.device=cuda", "runtime.device=cuda:1"],
    "rl-lab train Acrobot-v1:": ["Acrobot-v1:ppo"],
    "rl-lab train --env Acro": ["Acrobot-v1"],
    "rl-lab envs check Acro": ["Acrobot-v1"],
    "rl-lab train --algorithm dq": ["dqn"],
    "rl-lab resume my": ["my_run"],
    "rl-lab resume @": ["@best", "@last"],
    "rl-lab resume my_run training.ph": ["training.phases.train.duration_steps="],
    "rl-lab resume --mode warm_start_": ["warm_start_optimizer"],
}


@pytest.fixture
def folder(rl: Any, tmp_path: Path) -> Path:
    """With the scripts of all shells, the words, and one run."""
    for shell in ("bash", "zsh", "fish", "words"):
        (tmp_path / f"completion.{shell}").write_text(rl("completion", shell).out)
    (tmp_path / "runs" / "my_run").mkdir(parents=True)
    (tmp_path / "runs" / "my_run" / "config.yaml").write_text("")
    return tmp_path


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_a_real_fish_completes(folder: Path) -> None:
    script = ["source completion.fish", "function rl-lab; cat completion.words; end"]
    script += [f"echo '> {line}'; complete -C '{line}'" for line in TYPED]
    environment = {**os.environ, "HOME": str(folder)}
    command = ["fish", "--no-config", "-c", "\n".join(script)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder, env=environment)
    assert answer.stderr == ""
    offered: dict[str, list[str]] = {}
    for line in answer.stdout.splitlines():
        if line.startswith("> "):
            words = offered[line[2:]] = []
        else:
            words.append(line.split("\t")[0])
    assert {line: sorted(words) for line, words in offered.items()} == TYPED


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_a_real_zsh_completes(folder: Path) -> None:
    """Typed into a zsh on a pseudo-terminal: one candidate is written out, several are listed."""
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        os.execvpe("zsh", ["zsh", "-f", "-i"], {**os.environ, "TERM": "dumb", "HOME": str(folder)})

    def read_until(expected: str) -> str:
        seen, end = "", time.monotonic() + 30
        while expected not in seen and time.monotonic() < end:
            if select.select([terminal], [], [], 0.1)[0]:
                seen += os.read(terminal, 65536).decode(errors="replace")
        assert expected in seen, f"{expected!r} is not in {seen!r}"
        return seen

    try:
        begin = (
            "PS1=; setopt no_beep; autoload -Uz compinit; compinit -u -D; source completion.zsh; stty cols 200 rows 90;"
        )
        os.write(terminal, f"{begin} rl-lab() {{ cat completion.words }}; echo rea''dy\n".encode())
        read_until("ready")
        for line, words in TYPED.items():
            os.write(terminal, f"{line}\t".encode())
            if len(words) == 1:  # written out, and with a space where the word is whole
                read_until(line.rpartition(" ")[0] + f" {words[0]}" + " " * (not words[0].endswith("=")))
            else:  # listed, each on the same line
                if not line.endswith(("--run", "@")):
                    os.write(terminal, b"\t")  # the first one wrote what they have in common
                read_until(words[-1])
            os.write(terminal, b"\x15")
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(terminal)
