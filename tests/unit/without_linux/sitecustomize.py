"""Python on a system that has no mallopt, prctl, /proc, affinity and fork; each process reads this at its start."""

import builtins
import ctypes
import errno
import io
import multiprocessing
import os
import platform
import sys


class Library(ctypes.CDLL):
    def __getattr__(self, name):
        if name in ("mallopt", "prctl"):
            raise AttributeError(name)
        return super().__getattr__(name)


def without_proc(function):
    def call(path, *args, **kwargs):
        if str(path).startswith("/proc"):
            raise FileNotFoundError(errno.ENOENT, "not on this system", path)
        return function(path, *args, **kwargs)

    return call


for name in ("fork", "getuid", "sched_setaffinity", "sched_getaffinity"):
    delattr(os, name)
os.stat = without_proc(os.stat)
os.listdir = without_proc(os.listdir)
os.scandir = without_proc(os.scandir)
os.readlink = without_proc(os.readlink)
os.open = without_proc(os.open)
io.open = builtins.open = without_proc(io.open)
ctypes.CDLL = Library
sys.platform = "freebsd14"
sys.modules["fcntl"] = None
sys.modules["triton"] = None  # It knows Linux only.
platform.libc_ver = lambda *_: ("", "")
multiprocessing.get_all_start_methods = lambda: ["spawn"]
