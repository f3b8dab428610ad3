"""The words with which `wandb agent` calls a training, as overrides.

A W&B sweep writes its parameters as `--algorithm.discount=0.98` (its default, `${args}`), as
`--algorithm.discount 0.98`, as a flag without value (`${args_no_boolean_flags}`) or as `algorithm.discount=0.98`
(`${args_no_hyphens}`).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from rl_lab.cli.parsing import Parser


class TrainingParser(Parser):
    """A parser that also takes settings with hyphens: dotted ones always, all of them in a W&B sweep."""

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        return super().parse(self.as_overrides(words, is_sweep=bool(os.environ.get("WANDB_SWEEP_ID"))))

    def as_overrides(self, words: Sequence[str], *, is_sweep: bool) -> list[str]:
        """`--key=value` and `--key value` as `key=value`, where `key` is no option of the command."""
        result, waiting = [], list(words)
        while waiting:
            word = waiting.pop(0)
            key, equals, value = word.removeprefix("--").partition("=")
            option = self._option_string_actions.get(word.partition("=")[0])
            if option or not word.startswith("--") or not key or not (is_sweep or "." in key):
                result.append(word)
                if option and option.nargs != 0 and not equals:
                    result += waiting[:1]  # the value of an option is nobody's setting
                    waiting = waiting[1:]
            elif equals:
                result.append(f"{key}={value}")
            elif waiting and not waiting[0].startswith("--") and "=" not in waiting[0]:
                result.append(f"{key}={waiting.pop(0)}")
            else:
                result.append(f"{key}=true")
        return result
