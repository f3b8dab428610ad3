"""`_target_` blocks -> objects. Constructors are the schema: an unknown key or a wrong value is refused by name.

A config may instantiate workflows, components, buffers and writers of `rl_lab`, classes of `torch.nn` and
`torch.optim`, and those of packages the user names under `plugins:`; nothing else. experiment/trust.py asks for
consent to saved configs.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from rl_lab.types import ConfigError, did_you_mean

HOMES = {  # where the classes lie that a config may name
    "rl_lab": ("rl_lab.workflows.", "rl_lab.components.", "rl_lab.buffers."),
    "torch": ("torch.nn.", "torch.optim."),
}
WRITERS = "rl_lab.metrics."  # they write files: named under logging.writers alone, which only a training builds
OWN_PACKAGES = tuple(HOMES)
WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
READERS: dict[Any, Callable[[Any, str], Any]] = {}  # how values of a protocol, which cannot read them itself, are read
PART_KEYS = {"input": "input_size", "target": "target_size"}  # `input: encoder` hands that part's output_size over


def import_plugins(plugins: Sequence[str]) -> None:
    """Import the user's packages; the folder the command was called in is searched too."""
    here = str(Path.cwd())
    if plugins and here not in sys.path:
        sys.path.append(here)  # last, so that a local folder cannot hide an installed package
    for name in plugins:
        if name.split(".")[0] in sys.stdlib_module_names:
            raise ConfigError(f"plugins names '{name}', a part of Python itself: name packages of your own.")
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is not None and not (name == error.name or name.startswith(f"{error.name}.")):
                raise
            raise ConfigError(
                f"plugins names '{name}', which Python does not find in {here} or among the installed packages. "
                "Install it (pip install -e .) or run from the folder that holds it."
            ) from error


def resolve_target(target: str, *, place: str, plugins: Sequence[str] = ()) -> type:
    """The class a `_target_` names, if a config may use it."""
    package = target.split(".")[0]
    named = [plugin.split(".")[0] for plugin in plugins]
    allowed = [*OWN_PACKAGES, *(name for name in named if name not in sys.stdlib_module_names)]
    if package not in allowed:
        is_own = package.isidentifier() and package not in sys.stdlib_module_names
        cure = f" To use your own package, write `plugins: [{package}]`." if is_own else ""
        raise ConfigError(
            f"{place}._target_ is '{target}', but a config may only use classes of {', '.join(allowed)}.{cure}"
        )
    module_name, _, class_name = target.rpartition(".")
    if not module_name:
        raise ConfigError(f"{place}._target_ is '{target}': write package.module.Class.")
    homes = HOMES.get(package, (f"{package}.",))
    if place.startswith("logging.writers"):
        homes = (*homes, WRITERS)
    if not target.startswith(homes):
        names = ", ".join(home.removesuffix(".") for home in homes)
        raise ConfigError(f"{place}._target_ is '{target}': of {package} it must name a class of {names}.")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{place}._target_ is '{target}': {error}.") from error
    found = getattr(module, class_name, None)
    if found is None:
        hint = did_you_mean(class_name, [name for name in vars(module) if not name.startswith("_")])
        raise ConfigError(f"{place}._target_ is '{target}', but {module_name} has no {class_name}.{hint}")
    if not inspect.isclass(found):
        raise ConfigError(f"{place}._target_ is '{target}': it must name a class.")
    if package in OWN_PACKAGES and found.__module__.split(".")[0] != package:  # what our modules import is not ours
        home = found.__module__
        raise ConfigError(f"{place}._target_ is '{target}': {class_name} is a class of {home}, not of {package}.")
    return found


def construct(
    block: Mapping[str, Any],
    *,
    place: str,
    injected: Mapping[str, Any] | None = None,
    parts: Mapping[str, Any] | None = None,
    plugins: Sequence[str] = (),
) -> Any:
    """The object a block describes. `injected` fills constructor parameters of those names (specs, sizes)."""
    if not isinstance(block, Mapping) or "_target_" not in block:
        raise ConfigError(
            f"{place} has no `_target_`: write which class to build. "
            "(Where size= or task= brought it: this algorithm has no such part, so leave that out.)"
        )
    target = resolve_target(str(block["_target_"]), place=place, plugins=plugins)
    given = {str(key): value for key, value in block.items() if key != "_target_"}
    return call_checked(target, given, place=place, injected=injected or {}, parts=parts or {}, plugins=plugins)


def call_checked(
    target: Any,
    given: Mapping[str, Any],
    *,
    place: str,
    injected: Mapping[str, Any] | None = None,
    parts: Mapping[str, Any] | None = None,
    plugins: Sequence[str] = (),
) -> Any:
    """Call a class or function with settings, every one of them checked against its signature."""
    parameters, hints = parameters_of(target)
    arguments = {name: value for name, value in (injected or {}).items() if name in parameters}
    settable = [name for name in parameters if name not in arguments]
    named = {key: size for key, size in PART_KEYS.items() if size in parameters}
    for key, value in given.items():
        if key in named:
            arguments[named[key]] = _output_size(value, parts or {}, f"{place}.{key}")
        elif key not in settable:
            allowed = [*named, *settable]
            raise ConfigError(
                f"{place}.{key} is not a setting of {_name(target)}.{did_you_mean(key, allowed)} "
                f"Allowed: {', '.join(allowed) or 'nothing'}."
            )
        elif isinstance(value, Mapping) and "_target_" in value:
            arguments[key] = construct(value, place=f"{place}.{key}", injected=injected, parts=parts, plugins=plugins)
        else:
            arguments[key] = checked_value(value, hints.get(key, Any), place=f"{place}.{key}")
    missing = [name for name, p in parameters.items() if p.default is p.empty and name not in arguments]
    if missing:
        wanted = next((key for key, size in named.items() if size == missing[0]), missing[0])
        raise ConfigError(f"{place} lacks '{wanted}', which {_name(target)} needs.")
    return target(**arguments)


def parameters_of(target: Any) -> tuple[dict[str, inspect.Parameter], dict[str, Any]]:
    """Parameters and their types; of a class that passes `**keywords` on, its base's keywords as well."""
    if not inspect.isclass(target):
        return _read_parameters(target)
    inits = tuple(vars(base).get("__init__") for base in inspect.getmro(target))
    known: Any = target
    return _of_class(known, inits)


@lru_cache(maxsize=256)  # an experiment has dozens of blocks of the same few classes
def _of_class(target: Any, inits: tuple[Any, ...]) -> tuple[dict[str, inspect.Parameter], dict[str, Any]]:
    """A class that was given another `__init__`, or its base was, is read anew."""
    return _read_parameters(target)


def _read_parameters(target: Any) -> tuple[dict[str, inspect.Parameter], dict[str, Any]]:
    found = inspect.signature(target).parameters
    parameters = {n: p for n, p in found.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    is_made_of_fields = is_dataclass(target) and parameters.keys() <= target.__dataclass_fields__.keys()
    hints = get_type_hints(target.__init__ if inspect.isclass(target) and not is_made_of_fields else target)
    if inspect.isclass(target) and any(p.kind is p.VAR_KEYWORD for p in found.values()):
        theirs, their_hints = parameters_of(target.__mro__[1])
        parameters |= {n: p for n, p in theirs.items() if p.kind is p.KEYWORD_ONLY and n not in parameters}
        hints = {**their_hints, **hints}
    return parameters, hints


def checked_value(value: Any, annotation: Any, *, place: str) -> Any:
    """The value as the annotation wants it (lists as tuples where asked), or a ConfigError.

    A class that has `from_config(value, place)`, such as Schedule, reads its own spellings.
    """
    options = _options(annotation)
    if not isinstance(value, bool | None):
        for option in options:
            reader = READERS.get(option) or getattr(option, "from_config", None)
            if reader is not None:
                return reader(value, place)
    if isinstance(value, float) and value.is_integer() and int in options and float not in options:
        value = int(value)  # 1e5
    for option in options:
        fits, converted = _fit(value, option, place)
        if fits:
            return converted
    allowed = " or ".join(dict.fromkeys(_words(option) for option in options))
    literals = [choice for option in options if get_origin(option) is Literal for choice in get_args(option)]
    hint = did_you_mean(str(value), literals)
    shown = " Write {id: NAME}, such as {id: frame_stack, count: 4} (docs/wrappers.md)." if _is_wrapper(place) else ""
    raise ConfigError(f"{place} is {value!r}.{hint} Allowed: {allowed}.{shown}")


def _options(annotation: Any) -> list[Any]:
    if get_origin(annotation) in (Union, types.UnionType):
        return [option for argument in get_args(annotation) for option in _options(argument)]
    return [annotation]


def _fit(value: Any, option: Any, place: str) -> tuple[bool, Any]:
    origin = get_origin(option)
    if option is None or option is type(None):
        return value is None, None
    if origin is Literal:
        return value in get_args(option), value
    if option is bool or isinstance(value, bool):
        return (option is bool and isinstance(value, bool)) or option is Any, value
    if option is float:
        return isinstance(value, int | float), float(value) if isinstance(value, int | float) else value
    if option in (int, str):
        return isinstance(value, option), value
    if origin in (list, tuple, Sequence) or (inspect.isclass(origin) and issubclass(origin, Sequence)):
        return _fit_sequence(value, option, origin, place)
    if inspect.isclass(origin) and issubclass(origin, Mapping):
        return _fit_mapping(value, option, place)
    return True, value  # protocols and own classes are the constructor's to check


def _fit_sequence(value: Any, option: Any, origin: Any, place: str) -> tuple[bool, Any]:
    if not isinstance(value, list | tuple):
        return False, value
    inner: Sequence[Any] = get_args(option)
    if not _is_fixed(option):
        inner = [inner[0] if inner else Any] * len(value)
    if len(inner) != len(value):
        return False, value
    pairs = enumerate(zip(value, inner, strict=True))
    items = [checked_value(element, item, place=f"{place}.{index}") for index, (element, item) in pairs]
    return True, items if origin is list else tuple(items)


def _is_wrapper(place: str) -> bool:
    return place.startswith("environment.wrappers.") and place.count(".") == 2


def _is_fixed(option: Any) -> bool:
    """Whether a list has so many elements and no other number: `tuple[float, float]`."""
    return get_origin(option) is tuple and Ellipsis not in get_args(option)


def _fit_mapping(value: Any, option: Any, place: str) -> tuple[bool, Any]:
    if not isinstance(value, Mapping):
        return False, value
    inner = get_args(option)
    item = inner[1] if len(inner) == 2 else Any
    return True, {key: checked_value(element, item, place=f"{place}.{key}") for key, element in value.items()}


def _words(option: Any) -> str:
    if option is None or option is type(None):
        return "null"
    if get_origin(option) is Literal:
        return ", ".join(str(choice) for choice in get_args(option))
    if _is_fixed(option):
        return f"a list of {len(get_args(option))}"
    if get_origin(option) is not None:
        return "a mapping" if issubclass(get_origin(option), Mapping) else "a list"
    if hasattr(option, "from_config"):
        return f"a {option.__name__.lower()}"
    return WORDS.get(option, str(option))


def _output_size(name: Any, parts: Mapping[str, Any], place: str) -> int:
    if isinstance(name, list | tuple):  # the first of several that is there
        name = next((candidate for candidate in name if candidate in parts), name[-1] if name else "[]")
    if name not in parts:
        raise ConfigError(
            f"{place} is '{name}', which is no component built before it."
            f"{did_you_mean(str(name), parts)} There are: {', '.join(parts) or 'none'}. "
            "(Where decoder= or exploration= brought it: this algorithm has no world model, so leave that out.)"
        )
    size = getattr(parts[name], "output_size", None)
    if not isinstance(size, int):
        raise ConfigError(f"{place} is '{name}', a {type(parts[name]).__name__} without an output_size.")
    return size


def _name(target: Any) -> str:
    return getattr(target, "__name__", str(target))
