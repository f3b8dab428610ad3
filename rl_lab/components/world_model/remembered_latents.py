"""What V of World Models makes of the images of rows, kept in the rows: M meets each many times, and V is done by then.

    row t          0      1      2      3
    normal         n0     n1     0      0         what V made of the row's image, mean and log variance of its latent
    normal_of      v      v      u      0         which V: a number of its parameters and its class; 0: none did yet

What V made as it is now is taken as it stands; images of other rows are encoded, and the replay takes the result over.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from rl_lab.types import Batch

NORMAL, OF = "normal", "normal_of"


class VAE(Protocol):
    output_size: int
    image_key: str
    parameters: Callable[[], Iterable[Tensor]]
    forward: Callable[[Batch], Tensor]

    def __call__(self, observation: Batch) -> Tensor: ...


class Runtime(Protocol):
    autocast: Callable[[], Any]
    to_device: Callable[[Batch], Batch]


class RememberedLatents:
    def __init__(self, vae: VAE, runtime: Runtime) -> None:
        self.vae, self.runtime = vae, runtime
        self._versions: tuple[Any, ...] | None = None  # of the formula and the parameters that the number is of
        self._number = 0

    def forget(self) -> None:
        """V was changed, by a recorded graph perhaps, which torch does not count."""
        self._versions = None

    @property
    def number(self) -> int:
        """Stands for V as it is, its parameters and the text of its class; never 0."""
        parameters = [each.detach() for each in self.vae.parameters()]
        versions = (type(self.vae).forward, *((each.data_ptr(), each._version) for each in parameters))
        if versions != self._versions:
            self._versions, self._number = versions, (1 << 32) + zlib.crc32(text_of(type(self.vae)).encode())
            for each in parameters:
                self._number ^= zlib.crc32(each.cpu().contiguous().numpy().tobytes(), self._number & 0xFFFFFFFF)
        return self._number

    def blank(self, count: int, device: torch.device) -> Batch:
        """Extras of rows `[N]` that V has not looked at."""
        normal_of = torch.zeros(count, dtype=torch.int64, device=device)
        return {NORMAL: torch.zeros(count, self.vae.output_size, device=device), OF: normal_of}

    def seen(self, normal: Tensor) -> Batch:
        """Extras of rows of which V has just made this `[N, 2 Z]`."""
        return {NORMAL: normal, OF: torch.full(normal.shape[:-1], self.number, device=normal.device)}

    def of_rows(self, rows: Batch) -> Tensor:
        """Normals `[B, T, 2 Z]` of rows. Images that are not known are encoded, and the rows get the result."""
        images = rows[self.vae.image_key]
        if NORMAL not in rows:
            return self.encode(images)
        unknown = rows[OF] != self.number
        if not unknown.any():
            return rows[NORMAL]
        encoded = self.encode(images[unknown])
        normal = rows[NORMAL].to(encoded.device, copy=True)
        normal[unknown.to(encoded.device)] = encoded
        rows |= self.seen(normal)
        return normal

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        with self.runtime.autocast():
            return self.vae(self.runtime.to_device({self.vae.image_key: images}))


def text_of(kind: type) -> str:
    """The source of a class, if it has one, and what its `forward` was compiled to, which may be replaced."""
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):
        source = ""
    return source + repr(kind.forward.__code__.co_code)  # type: ignore[attr-defined]
