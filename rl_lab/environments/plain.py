"""Plain values as text and back, bit for bit, without ever running code.

An environment's attributes hold things a checkpoint must not pickle: tuples, sets, deques, dicts with integer keys,
numpy scalars, random generators. `to_text` writes them as JSON in which every JSON object is one tagged value;
`from_text` reads it. Floats survive because JSON writes Python's shortest exact form.
"""

from __future__ import annotations

import base64
import json
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

import numpy as np

BIT_GENERATORS = {
    cls.__name__: cls
    for cls in (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
}
MAPPINGS: dict[str, Callable[..., Any]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
ARRAY_KINDS = "biufcSUMm"  # booleans, numbers, fixed-width text, dates: everything whose bytes say it all
SIMPLE = frozenset({type(None), bool, int, float, str})  # JSON says these as they are
Seen = dict[int, Any]  # changeable objects met so far, by id; held, so that no id is used twice


class NotPlainError(TypeError):
    """A value is not plain data; the message is its path and its type."""


def to_text(value: Any) -> str:
    """One line of JSON. Raises NotPlainError with the path of the first value that is not plain data."""
    return json.dumps(_encode(value, {}), separators=(",", ":"))


def text_or_none(value: Any) -> str | None:
    """`to_text`, or None where the value is not plain data."""
    try:
        return to_text(value)
    except NotPlainError:
        return None


def from_text(text: str) -> Any:
    """The value `to_text` was given."""
    return _decode(json.loads(text))


def _encode(value: Any, seen: Seen) -> Any:
    kind = type(value)
    if kind in SIMPLE:
        return value
    if kind is tuple:
        return {"tuple": _encode_all(count(), value, seen)}
    if isinstance(value, np.generic):
        return _encode_bytes("scalar", np.asarray(value))
    if kind is bytes:
        return {"bytes": value.hex()}
    _refuse_alias(value, seen)
    if kind is list:
        return _encode_all(count(), value, seen)
    if kind is np.ndarray:
        return _encode_bytes("array", value)
    if kind.__name__ in MAPPINGS and kind is MAPPINGS[kind.__name__]:
        pairs = zip(_encode_all(value, value, seen), _encode_all(value, value.values(), seen), strict=True)
        return {kind.__name__: [list(pair) for pair in pairs]}
    if kind is deque:
        return {"deque": [value.maxlen, _encode_all(count(), value, seen)]}
    if kind in (set, frozenset):
        return {kind.__name__: sorted(_encode_all(count(), value, seen), key=json.dumps)}
    return _encode_random(value, seen)


def _encode_all(places: Iterable[Any], values: Iterable[Any], seen: Seen) -> list[Any]:
    """Every value; `places` are put into the path of one that is not plain."""
    encoded: list[Any] = []
    for place, value in zip(places, values, strict=False):
        try:
            encoded.append(value if type(value) in SIMPLE else _encode(value, seen))
        except NotPlainError as error:
            raise NotPlainError(f"[{place!r}]{error}") from None
    return encoded


def _refuse_alias(value: Any, seen: Seen) -> None:
    """Two names for one changeable object would become two objects; that is no exact copy."""
    owner = value
    while isinstance(owner, np.ndarray) and isinstance(owner.base, np.ndarray):
        owner = owner.base
    if id(owner) in seen:
        raise NotPlainError(" (shared with another attribute)")
    seen[id(owner)] = owner


def _encode_bytes(tag: str, array: np.ndarray) -> dict[str, Any]:
    if array.dtype.kind not in ARRAY_KINDS:
        raise NotPlainError(f" (array of {array.dtype})")
    # The memory order is kept: a sum over the other order rounds differently.
    order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    data = base64.b64encode(array.tobytes(order=order)).decode("ascii")  # type: ignore[arg-type]
    return {tag: [array.dtype.str, list(array.shape), order, data]}


def _encode_random(value: Any, seen: Seen) -> dict[str, Any]:
    if type(value) is np.random.Generator and type(value.bit_generator).__name__ in BIT_GENERATORS:
        bits, seeds = value.bit_generator, value.bit_generator.seed_seq
        lineage = None  # only `spawn` reads it, but then it matters
        if isinstance(seeds, np.random.SeedSequence):
            lineage = (seeds.entropy, tuple(seeds.spawn_key), seeds.pool_size, seeds.n_children_spawned)
        return {"generator": _encode((type(bits).__name__, bits.state, lineage), seen)}
    if type(value) is np.random.RandomState:
        return {"random_state": _encode(value.get_state(legacy=False), seen)}
    if type(value) is random.Random:
        return {"random": _encode(value.getstate(), seen)}
    raise NotPlainError(f" ({type(value).__module__}.{type(value).__qualname__})")


def _decode(node: Any) -> Any:
    if isinstance(node, list):
        return [_decode(item) for item in node]
    if not isinstance(node, dict):
        return node
    ((tag, body),) = node.items()
    if tag in MAPPINGS:
        return MAPPINGS[tag]({_decode(key): _decode(value) for key, value in body})
    return DECODERS[tag](body)


def _decode_array(body: list[Any]) -> np.ndarray:
    dtype, shape, order, data = body
    flat = np.frombuffer(base64.b64decode(data), dtype=np.dtype(dtype))
    return flat.reshape(shape, order=order).copy(order=order)


def _decode_generator(body: Any) -> np.random.Generator:
    name, state, lineage = _decode(body)
    seeds = None
    if lineage is not None:
        entropy, spawn_key, pool_size, children = lineage
        seeds = np.random.SeedSequence(entropy, spawn_key=spawn_key, pool_size=pool_size, n_children_spawned=children)
    bits = BIT_GENERATORS[name](seeds)
    bits.state = state
    return np.random.Generator(bits)


def _restored(generator: Any, restore: str, body: Any) -> Any:
    getattr(generator, restore)(_decode(body))
    return generator


DECODERS: dict[str, Callable[[Any], Any]] = {
    "tuple": lambda body: tuple(_decode(item) for item in body),
    "bytes": bytes.fromhex,
    "scalar": lambda body: _decode_array(body)[()],
    "array": _decode_array,
    "deque": lambda body: deque((_decode(item) for item in body[1]), maxlen=body[0]),
    "set": lambda body: {_decode(item) for item in body},
    "frozenset": lambda body: frozenset(_decode(item) for item in body),
    "generator": _decode_generator,
    "random_state": lambda body: _restored(np.random.RandomState(), "set_state", body),
    "random": lambda body: _restored(random.Random(), "setstate", body),
}
