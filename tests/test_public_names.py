"""The names behind `rl_lab.`: all are there, completed, and imported only when used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import rl_lab


@pytest.mark.parametrize("name", rl_lab.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert callable(getattr(rl_lab, name))


def test_completion_knows_every_public_name_before_anything_is_imported() -> None:
    program = "import sys, rl_lab; assert set(rl_lab.__all__) <= set(dir(rl_lab)); "
    program += "print([name for name in ('torch', 'numpy', 'gymnasium', 'hydra') if name in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout == "[]\n"


def test_a_name_that_is_not_there_says_so() -> None:
    with pytest.raises(AttributeError, match=r"has no attribute 'PPO': write rl_lab\.train\('ppo', env=\.\.\., total_"):
        _ = rl_lab.PPO
    with pytest.raises(AttributeError, match=r"module 'rl_lab' has no attribute 'trian'. Did you mean 'train'\?"):
        _ = rl_lab.trian
