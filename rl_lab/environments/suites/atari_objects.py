"""Where games keep what a player looks at: small tables of memory addresses.

They are those that Anand et al. (2019) published (mila-iqia/atari-representation-learning, ram_annotations.py) and
Breakout's lives. Tests compare eight of them with the screen, lives and scores with what ALE says.
Every number is one byte divided by 255, so that the order of a table is all that a network must know; scores of Boxing
and Freeway are binary-coded decimals.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rl_lab.types import ConfigError

TABLES: dict[str, dict[str, int]] = {
    "boxing": {"player_x": 32, "enemy_x": 33, "player_y": 34, "enemy_y": 35, "player_score": 18, "enemy_score": 19},
    "breakout": {
        "player_x": 72, "ball_x": 99, "ball_y": 101, "lives": 57, **{f"bricks_{i}": i for i in range(30)}
    },
    "freeway": {"player_y": 14, "score": 103, **{f"car_{i}_x": 108 + i for i in range(10)}},
    "pong": {
        "player_y": 51, "enemy_y": 50, "ball_x": 49, "ball_y": 54, "enemy_score": 13, "player_score": 14
    },
    "space_invaders": {
        "player_x": 28, "invaders_left": 17, "invaders_x": 26, "invaders_y": 24, "missile_y": 9, "lives": 73
    },
}  # fmt: skip


@dataclass(frozen=True)
class ObjectTable:
    """Names and addresses of one game."""

    names: tuple[str, ...]
    addresses: np.ndarray

    @property
    def size(self) -> int:
        return len(self.names)

    def read(self, ram: np.ndarray) -> np.ndarray:
        """float32 [size] in [0, 1]"""
        return np.asarray(ram)[self.addresses].astype(np.float32) / 255


def object_table(game: str) -> ObjectTable:
    if game not in TABLES:
        raise ConfigError(
            f"environment.kwargs.observation of 'atari/{game}' is 'objects', but nobody wrote down where this game "
            f"keeps them. Games with a table: {', '.join(TABLES)}. Write ram, grey or rgb."
        )
    return ObjectTable(tuple(TABLES[game]), np.array(list(TABLES[game].values())))
