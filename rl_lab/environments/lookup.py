"""From an id to a registered Gymnasium environment, or to an error that says what to write or to install."""

from __future__ import annotations

import importlib
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec as GymnasiumSpec

from rl_lab.environments.handed import is_handed, not_here
from rl_lab.environments.rendering import prepare_headless
from rl_lab.types import ConfigError, MissingExtraError, did_you_mean


@dataclass(frozen=True)
class Suite:
    """A family of environments, how its ids begin, and the extra that brings it."""

    name: str
    extra: str | None
    prefixes: tuple[str, ...] = ()  # of ids that exist only after `module` was imported
    module: str | None = None
    entry_points: tuple[str, ...] = ()  # parts of an entry point that tell the suite
    needs: str | None = None  # the module whose absence means that the suite is not installed
    uses_mujoco: bool = False
    apart: str = ""  # how to install what cannot live beside the others


SUITES = (
    Suite("toy", None, entry_points=("rl_lab.environments.suites.toy", "rl_lab.environments.suites.bandits")),
    Suite("atari", "atari", ("ALE/",), "ale_py", ("ale_py", "rl_lab.environments.suites.atari"), "ale_py"),
    Suite("minigrid", "minigrid", ("MiniGrid-", "BabyAI-"), "minigrid", ("minigrid",), "minigrid"),
    Suite("dmc", "dmc", entry_points=("rl_lab.environments.suites.dmc",), needs="dm_control", uses_mujoco=True),
    Suite(
        "box2d", "box2d", entry_points=("gymnasium.envs.box2d", "rl_lab.environments.suites.car_racing"), needs="Box2D"
    ),
    Suite("crafter", "crafter", entry_points=("rl_lab.environments.suites.crafter",), needs="crafter"),
    Suite(
        "memory_maze",
        "memory-maze",
        entry_points=("suites.memory_maze", "memory_maze"),
        needs="memory_maze",
        uses_mujoco=True,
    ),
    Suite("vizdoom", "vizdoom", ("Vizdoom",), "vizdoom.gymnasium_wrapper", ("suites.doom", "vizdoom"), "vizdoom"),
    Suite("retro", "retro", entry_points=("rl_lab.environments.suites.retro",), needs="stable_retro"),
    Suite("bsuite", "bsuite", entry_points=("rl_lab.environments.suites.behaviour",), needs="bsuite"),
    Suite("popgym", "popgym", ("popgym-",), "popgym", ("popgym",), "popgym"),
    Suite("brax", "brax", entry_points=("rl_lab.environments.suites.brax",), needs="brax"),
    Suite("mujoco", "mujoco", entry_points=("gymnasium.envs.mujoco",), needs="mujoco", uses_mujoco=True),
    Suite(
        "push_t",
        None,
        ("gym_pusht/",),
        "gym_pusht",
        ("gym_pusht",),
        "gym_pusht",
        apart="pip install -c constraints.txt -e . gym-pusht in a virtual environment of its own: "
        "it replaces pygame-ce.",
    ),
    Suite(
        "metaworld",
        None,
        entry_points=("suites.meta_world",),
        needs="metaworld",
        uses_mujoco=True,
        apart="pip install -e . metaworld in a virtual environment of its own: it wants mujoco 3.3.0.",
    ),
    Suite(
        "minecraft",
        None,
        entry_points=("suites.minecraft",),
        needs="minerl",
        apart="MineRL and MineDojo download Minecraft and want Java 8: see Minecraft in docs/environments.md.",
    ),
    Suite("classic_control", None, entry_points=("gymnasium.envs.classic_control",)),
    Suite("toy_text", None, entry_points=("gymnasium.envs.toy_text",)),
    Suite("jax", None, entry_points=("gymnasium.envs.phys2d", "gymnasium.envs.tabular"), needs="jax"),
)


def suite_of(spec: GymnasiumSpec) -> Suite | None:
    """The suite an environment belongs to; None for a user's own."""
    entry = spec.entry_point if isinstance(spec.entry_point, str) else getattr(spec.entry_point, "__module__", None)
    entry = entry or ""  # a partial has no module
    if entry == "gymnasium.envs:_raise_mujoco_py_error":
        entry = "gymnasium.envs.mujoco"
    return next((suite for suite in SUITES if any(part in entry for part in suite.entry_points)), None)


def find(env_id: str) -> GymnasiumSpec:
    """The registered spec of `Name-v0`, `namespace/Name-v0` or `package:Name-v0` (the package is imported first)."""
    module, _, name = env_id.rpartition(":")
    if module:
        _import_users_module(module, env_id)
    for suite in SUITES:
        if suite.module is not None and name.startswith(suite.prefixes) and name not in gym.registry:
            try:
                importlib.import_module(suite.module)  # importing it registers its ids
            except ModuleNotFoundError as error:
                raise missing_extra(name, suite, error) from error
    if name not in gym.registry:
        raise ConfigError(not_here(name) if is_handed(name) else _unknown(module, name))
    return gym.registry[name]


def _import_users_module(module: str, env_id: str) -> None:
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # last, so that a local folder cannot hide an installed package
    prepare_headless()  # it may import a simulator
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(error.name + ".")):
            raise ConfigError(
                f"environment.id '{env_id}': there is no Python package '{module}'. It was looked for in {here} and "
                f"among the packages installed for {sys.executable}. Start from the folder that holds it, or install "
                "it there with `pip install -e PATH`."
            ) from error
        raise ConfigError(
            f"environment.id '{env_id}': importing '{module}' failed because it needs '{error.name}'. "
            f"Install that with `pip install {error.name}`."
        ) from error
    except Exception as error:  # whatever a user's module raises
        what = f"{type(error).__name__}: {error}"
        raise ConfigError(f"environment.id '{env_id}': importing '{module}' failed: {what}.") from error


def missing_extra(env_id: str, suite: Suite | None, error: Exception) -> MissingExtraError:
    """The error for a dependency that is not there."""
    what, package = "a package", getattr(error, "name", None)
    if suite is not None and suite.extra is not None:
        what, package = "an extra", f"'rl-lab[{suite.extra}]'"
    cure = f"Install it with: pip install {package}" if package else "Install what the message names."
    cure = suite.apart if suite is not None and suite.apart else cure
    return MissingExtraError(f"environment '{env_id}' needs {what} that is not installed ({error}). {cure}")


def newest_version(name: str) -> str | None:
    """The registered id with the same name and the highest version."""
    base = re.sub(r"-v\d+$", "", name)
    versions = [
        (int(m.group(1)), key) for key in gym.registry if (m := re.fullmatch(re.escape(base) + r"-v(\d+)", key))
    ]
    return max(versions)[1] if versions else None


def _unknown(module: str, name: str) -> str:
    alike = (key for key in gym.registry if re.sub(r"-v\d+$", "", key).lower() == re.sub(r"-v\d+$", "", name).lower())
    newest = newest_version(name) or newest_version(next(alike, ""))  # cartpole
    if newest is not None and _version(newest) >= _version(name):  # where ale_py was imported, Pong-v4 is the newest
        cure = f"{module}:{newest}" if module else newest
        return f"environment.id '{name}' is not registered; this environment is now called '{newest}'. Write {cure}."
    hint = f" Did you mean '{found}'?" if (found := _spelt_otherwise(name)) else did_you_mean(name, gym.registry)
    return (
        f"environment.id '{name}' is not registered.{hint} `rl-lab envs` lists all ids; an environment of your own is "
        "written as package:Name-v0, where importing the package registers it."
    )


def _spelt_otherwise(name: str) -> str | None:
    """The id that a config's name or another library's id means: crafter, minigrid/doorkey_5x5, Pong-v5."""
    for suite in SUITES:
        if suite.module is not None and any(_letters(name).startswith(_letters(each)) for each in suite.prefixes):
            with suppress(ImportError):
                importlib.import_module(suite.module)
    whole, last = _letters(name), _letters(name.rpartition("/")[2])
    found = [key for key in gym.registry if _letters(key) == whole or _letters(key.rpartition("/")[2]) == last]
    found.sort(key=lambda key: not key.startswith("atari/"))  # atari/pong before Pong-v4 and ALE/Pong-v5
    return newest_version(found[0]) or found[0] if found else None


def _version(name: str) -> int:
    """-1 where an id has none."""
    match = re.search(r"-v(\d+)$", name)
    return int(match.group(1)) if match else -1


def _letters(name: str) -> str:
    """`car_racing` and `CarRacing-v3` are the same word."""
    return re.sub(r"[^a-z0-9]", "", re.sub(r"-v\d+$", "", name).lower())
