"""Which ways of drawing without a screen work here. Each is tried in a process of its own: a driver may crash."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

PROBE_TIMEOUT_S = 30
EGL_PROBE = """
import ctypes
egl = ctypes.CDLL("libEGL.so.1")
egl.eglGetProcAddress.restype = ctypes.c_void_p
egl.eglInitialize.argtypes = [ctypes.c_void_p] * 3
def call(name, result, *kinds):
    address = egl.eglGetProcAddress(name)
    assert address, f"libEGL has no {name.decode()}"
    return ctypes.CFUNCTYPE(result, *kinds)(address)
pointer, number = ctypes.c_void_p, ctypes.c_uint
devices, count = (pointer * 16)(), ctypes.c_int()
call(b"eglQueryDevicesEXT", number, ctypes.c_int, pointer, pointer)(16, devices, ctypes.byref(count))
display_of = call(b"eglGetPlatformDisplayEXT", pointer, number, pointer, pointer)
displays = [display_of(0x313F, device, None) for device in devices[: count.value]]  # EGL_PLATFORM_DEVICE_EXT
assert any(egl.eglInitialize(each, None, None) for each in displays if each), "no EGL device can be opened"
"""
OSMESA_PROBE = """
import ctypes, ctypes.util
name = ctypes.util.find_library("OSMesa")
assert name, "libOSMesa is not installed"
mesa = ctypes.CDLL(name)
mesa.OSMesaCreateContext.restype = ctypes.c_void_p
assert mesa.OSMesaCreateContext(0x1908, None), "OSMesa makes no context"  # GL_RGBA
"""
GLFW_PROBE = """
import warnings
warnings.simplefilter("ignore")
import glfw
assert glfw.init(), "GLFW finds no display"
"""


@dataclass(frozen=True)
class Backend:
    """One way to draw with OpenGL, how to try it, and what Debian brings it."""

    probe: str
    packages: str


BACKENDS = {
    "egl": Backend(EGL_PROBE, "libegl1 libegl-mesa0 libgl1 libgl1-mesa-dri"),
    "osmesa": Backend(OSMESA_PROBE, "libosmesa6"),
    "glfw": Backend(GLFW_PROBE, "libglfw3 xvfb"),
}


def why_not(name: str) -> str:
    """Why a backend does not work here; empty where it does."""
    return why_it_fails(BACKENDS[name].probe)


def why_it_fails(probe: str) -> str:
    """The last line of a program that failed, in words; empty where it came to its end."""
    command = [sys.executable, "-c", probe]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer within {PROBE_TIMEOUT_S} s"
    if done.returncode == 0:
        return ""
    if done.returncode < 0:
        return f"it crashed (signal {-done.returncode})"
    said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return said[-1].removeprefix("AssertionError: ").removeprefix("OSError: ")


def first_that_works(names: Sequence[str]) -> str | None:
    return next((name for name in names if not why_not(name)), None)
