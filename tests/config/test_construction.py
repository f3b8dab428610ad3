"""From `_target_` blocks to objects: constructors are the schema, and only known packages may be named."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from torch import nn

from rl_lab.config.construct import call_checked, checked_value, construct, import_plugins, resolve_target
from rl_lab.training.schedules import Schedule
from rl_lab.types import ConfigError


class Widget:
    """A constructor with every kind of parameter."""

    def __init__(
        self,
        *,
        size: int = 1,
        rate: float = 0.5,
        mode: Literal["fast", "slow"] = "fast",
        clip: float | Schedule | None = None,
        layers: Sequence[int] = (),
        names: list[str] | None = None,
        scales: Mapping[str, float | Schedule] | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        is_on: bool = False,
        part: Any = None,
        either: int | float = 1,
    ) -> None:
        self.settings = {key: value for key, value in locals().items() if key != "self"}


def widget(**given: Any) -> dict[str, Any]:
    return call_checked(Widget, given, place="widget").settings


# --- which classes may be named ----------------------------------------------------------------

FORBIDDEN = [
    ("os.system", r"may only use classes of rl_lab, torch\.$"),
    ("builtins.eval", "may only use classes of rl_lab, torch"),
    ("my_package.Thing", r"classes of rl_lab, torch\. To use your own package, write `plugins: \[my_package\]`"),
    ("subprocess.Popen", "may only use classes of rl_lab, torch"),
    ("torch.load", r"must name a class of torch.nn, torch.optim"),
    ("torch.hub.load", r"must name a class of torch.nn, torch.optim"),
    ("torch.utils.cpp_extension.CppExtension", r"must name a class of torch.nn, torch.optim"),
    ("torch.nn.init.ones_", "it must name a class"),
    ("rl_lab.buffers.budget.predict", "it must name a class"),
    ("rl_lab.workflows.base.ABC", "ABC is a class of abc, not of rl_lab"),
    (
        "rl_lab.metrics.writers.TextLogWriter",
        r"of rl_lab it must name a class of rl_lab\.workflows, rl_lab\.components",
    ),
    ("rl_lab", "write package.module.Class"),
    ("Encoder", "may only use classes of rl_lab, torch"),
    ("", "may only use classes of rl_lab, torch"),
]


@pytest.mark.parametrize(("target", "message"), FORBIDDEN)
def test_a_config_cannot_name_what_its_reader_did_not_install(target: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_target(target, place="components.x")


def test_a_module_is_not_even_imported_to_refuse_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.utils.cpp_extension", raising=False)
    with pytest.raises(ConfigError):
        resolve_target("torch.utils.cpp_extension.CppExtension", place="components.x")
    assert "torch.utils.cpp_extension" not in sys.modules


def test_our_classes_and_torchs_modules_may_be_named() -> None:
    assert resolve_target("torch.nn.Linear", place="x") is nn.Linear
    assert resolve_target("rl_lab.workflows.ppo.PPO", place="x").__name__ == "PPO"


def test_a_misspelt_class_or_module_is_named() -> None:
    with pytest.raises(ConfigError, match=r"x\._target_ is 'rl_lab.workflows.ppo.PP0', but .* Did you mean 'PPO'\?"):
        resolve_target("rl_lab.workflows.ppo.PP0", place="x")
    with pytest.raises(ConfigError, match=r"x\._target_ is 'rl_lab.workflows.pp0.PPO': No module named"):
        resolve_target("rl_lab.workflows.pp0.PPO", place="x")


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package of the user's own, in the folder the command was called in."""
    (tmp_path / "my_lab_plugin.py").write_text(
        "class Thing:\n    def __init__(self, *, size: int):\n        self.size = size\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_lab_plugin", raising=False)
    return "my_lab_plugin"


def test_a_plugin_is_found_in_the_folder_one_stands_in(plugin: str) -> None:
    import_plugins([plugin])
    block = {"_target_": f"{plugin}.Thing", "size": 3}
    assert construct(block, place="components.thing", plugins=[plugin]).size == 3
    with pytest.raises(ConfigError, match=rf"To use your own package, write `plugins: \[{plugin}\]`"):
        construct(block, place="components.thing")


def test_a_plugin_that_is_not_there_says_where_it_was_looked_for(plugin: str) -> None:
    with pytest.raises(ConfigError, match="plugins names 'my_lab_plugn', which Python does not find in .*pip install"):
        import_plugins(["my_lab_plugn"])


def test_a_plugin_that_lacks_something_itself_is_not_called_missing(plugin: str, tmp_path: Path) -> None:
    (tmp_path / "needs_more.py").write_text("import not_installed_anywhere\n")
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        import_plugins(["needs_more"])


def test_the_standard_library_is_no_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "this", raising=False)
    for plugins in (["this"], ["xml.dom"]):
        with pytest.raises(ConfigError, match=rf"plugins names '{plugins[0]}', a part of Python itself: name packages"):
            import_plugins(plugins)
    assert "this" not in sys.modules
    with pytest.raises(ConfigError, match=r"may only use classes of rl_lab, torch\.$"):
        resolve_target("subprocess.Popen", place="x", plugins=["subprocess"])


def test_a_folder_here_hides_no_installed_package(plugin: str, tmp_path: Path) -> None:
    (tmp_path / "antlr4.py").write_text("raise AssertionError('imported')\n")
    import_plugins([plugin, "antlr4"])


def test_without_plugins_the_search_path_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    import_plugins([])
    assert str(tmp_path) not in sys.path


# --- settings against signatures ---------------------------------------------------------------


def test_values_arrive_as_the_constructor_wants_them() -> None:
    made = widget(size=2, rate=1, layers=[64, 64], names=["a"], betas=[0.5, 1], clip="linear(0.2, 0)", is_on=True)
    assert (made["size"], made["rate"], made["layers"], made["names"]) == (2, 1.0, (64, 64), ["a"])
    assert type(made["rate"]) is float
    assert made["betas"] == (0.5, 1.0)
    assert made["clip"] == Schedule("linear", 0.2, 0.0)
    assert made["is_on"] is True


@pytest.mark.parametrize(("value", "kind"), [(64, int), (0.25, float)])
def test_a_number_of_either_kind_keeps_its_kind(value: float, kind: type) -> None:
    assert type(widget(either=value)["either"]) is kind


def test_schedules_are_read_wherever_they_may_stand() -> None:
    made = widget(
        scales={"policy": 1, "entropy": "linear(0.01, 0)", "value": {"schedule": "cosine", "start": 1, "end": 0}}
    )
    assert made["scales"]["policy"] == 1.0
    assert made["scales"]["entropy"] == Schedule("linear", 0.01, 0.0)
    assert made["scales"]["value"] == Schedule("cosine", 1.0, 0.0)
    assert widget(clip=None)["clip"] is None
    assert widget(clip=3)["clip"] == 3.0


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"sise": 2}, "widget.sise is not a setting of Widget. Did you mean 'size'? Allowed: size, rate, mode"),
    ({"size": 2.5}, "widget.size is 2.5. Allowed: a whole number."),
    ({"size": "2"}, "widget.size is '2'. Allowed: a whole number."),
    ({"size": True}, "widget.size is True. Allowed: a whole number."),
    ({"size": None}, "widget.size is None. Allowed: a whole number."),
    ({"rate": "fast"}, "widget.rate is 'fast'. Allowed: a number."),
    ({"is_on": 1}, "widget.is_on is 1. Allowed: true or false."),
    ({"mode": "fats"}, "widget.mode is 'fats'. Did you mean 'fast'? Allowed: fast, slow."),
    ({"layers": 64}, "widget.layers is 64. Allowed: a list."),
    ({"layers": "64"}, "widget.layers is '64'. Allowed: a list."),
    ({"layers": [64, "x"]}, "widget.layers.1 is 'x'. Allowed: a whole number."),
    ({"names": [3]}, "widget.names.0 is 3. Allowed: a text."),
    ({"scales": [1.0]}, "widget.scales is [1.0]. Allowed: a mapping or null."),
    ({"scales": {"policy": "much"}}, "widget.scales.policy: 'much' is neither a number nor a schedule."),
    ({"betas": [0.9]}, "widget.betas is [0.9]. Allowed: a list of 2."),
    ({"betas": [0.9, 0.9, 0.9]}, "widget.betas is [0.9, 0.9, 0.9]. Allowed: a list of 2."),
    ({"clip": True}, "widget.clip is True. Allowed: a number or a schedule or null."),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_a_wrong_setting_is_refused_with_its_place_and_what_is_allowed(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        widget(**given)
    assert str(refusal.value).startswith(message)


def test_dataclasses_and_functions_are_schemas_too() -> None:
    @dataclass(frozen=True)
    class Block:
        name: str
        tags: Sequence[str] = ()
        more: Mapping[str, Any] = field(default_factory=dict)

    def function(*, count: int, **ignored: Any) -> int:
        return count

    assert call_checked(Block, {"name": "x", "tags": ["a"]}, place="experiment") == Block("x", ("a",))
    assert call_checked(function, {"count": 2}, place="f") == 2
    with pytest.raises(ConfigError, match="experiment lacks 'name', which Block needs"):
        call_checked(Block, {}, place="experiment")
    with pytest.raises(ConfigError, match=r"f\.other is not a setting of function\. Allowed: count\."):
        call_checked(function, {"count": 2, "other": 3}, place="f")


def test_a_dataclass_of_ones_own_need_not_import_what_its_base_names(plugin: str, tmp_path: Path) -> None:
    (tmp_path / f"{plugin}.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from rl_lab.buffers.replay import ReplayBuffer\n"
        "@dataclass(kw_only=True, eq=False)\n"
        "class Mine(ReplayBuffer):\n"
        "    favourite: int = 3\n"
    )
    import_plugins([plugin])
    block = {"_target_": f"{plugin}.Mine", "favourite": 4, "n_step": 2}
    built = construct(block, place="buffers.replay", injected={"num_envs": 1}, plugins=(plugin,))
    assert (built.favourite, built.sequence_length) == (4, 3)
    with pytest.raises(ConfigError, match=r"buffers.replay.favourite is 'much'"):
        construct({**block, "favourite": "much"}, place="buffers.replay", injected={"num_envs": 1}, plugins=(plugin,))


def test_keywords_passed_on_to_the_base_are_settings_too() -> None:
    class Base:
        def __init__(self, numbers: int, /, *, width: int, name: str = "x") -> None:
            self.found = (numbers, width, name)

    class Special(Base):
        def __init__(self, *, count: int = 2, **keywords: Any) -> None:
            super().__init__(count, **keywords)

    assert call_checked(Special, {"width": 3, "count": 1}, place="x").found == (1, 3, "x")
    with pytest.raises(ConfigError, match=r"x lacks 'width', which Special needs"):
        call_checked(Special, {}, place="x")
    with pytest.raises(ConfigError, match=r"x\.numbers is not a setting of Special\..* Allowed: count, width, name\."):
        call_checked(Special, {"width": 3, "numbers": 4}, place="x")
    with pytest.raises(ConfigError, match=r"x\.width"):
        call_checked(Special, {"width": "wide"}, place="x")


# --- sizes and other parts ---------------------------------------------------------------------


class Head:
    def __init__(self, *, input_size: int, action: Any = None, scale: float = 1.0) -> None:
        self.input_size, self.action = input_size, action


class Sized:
    output_size = 12


TARGET = {"_target_": "rl_lab.components.heads.actor_critic.Critic"}


def test_injected_things_fill_parameters_of_their_name_and_cannot_be_set() -> None:
    made = call_checked(
        Head, {"input": "encoder"}, place="x", injected={"action": 5, "other": 6}, parts={"encoder": Sized()}
    )
    assert (made.input_size, made.action) == (12, 5)
    with pytest.raises(ConfigError, match=r"x\.action is not a setting of Head.* Allowed: input, input_size, scale"):
        call_checked(Head, {"input_size": 1, "action": 7}, place="x", injected={"action": 5})


def test_of_several_inputs_the_first_that_is_there_counts() -> None:
    parts = {"encoder": Sized()}
    made = call_checked(Head, {"input": ["critic_encoder", "encoder"]}, place="x", parts=parts)
    assert made.input_size == 12


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "x lacks 'input', which Head needs"),
        (
            {"input": "encodr"},
            r"x\.input is 'encodr', which is no component built before it\. Did you mean 'encoder'\?",
        ),
        ({"input": ["a", "b"]}, r"x\.input is 'b', which is no component built before it.* There are: encoder, plain"),
        ({"input": []}, r"x\.input is '\[\]', which is no component"),
        ({"input": "plain"}, r"x\.input is 'plain', a int without an output_size"),
    ],
)
def test_an_input_that_gives_no_size_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call_checked(Head, given, place="x", parts={"encoder": Sized(), "plain": 3})


def test_blocks_within_blocks_are_built_too() -> None:
    inner = {"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 3}
    built = call_checked(Widget, {"part": inner}, place="x").settings["part"]
    assert isinstance(built, nn.Linear)
    with pytest.raises(
        ConfigError, match=r"x\.part\.in_feature is not a setting of Linear\. Did you mean 'in_features'"
    ):
        call_checked(Widget, {"part": {"_target_": "torch.nn.Linear", "in_feature": 2}}, place="x")
    with pytest.raises(ConfigError, match=r"x\.part\._target_ is 'os.system', but a config may only use"):
        call_checked(Widget, {"part": {"_target_": "os.system", "command": "true"}}, place="x")


@pytest.mark.parametrize("block", [{}, {"hidden_sizes": [1]}, 3, "rl_lab.x.Y", [1]])
def test_a_block_without_a_target_is_refused(block: Any) -> None:
    with pytest.raises(ConfigError, match=r"components\.x has no `_target_`: write which class to build"):
        construct(block, place="components.x")


def test_annotations_that_cannot_be_judged_are_left_to_the_constructor() -> None:
    assert checked_value("anything", nn.Module, place="x") == "anything"
    assert checked_value([1], Any, place="x") == [1]
    assert checked_value(True, Any, place="x") is True
