"""Threads share a few heaps of the C library."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, sys, threading
from mediator.system.limits import limit_malloc_arenas

if sys.argv[2] == "limited":
    limit_malloc_arenas()
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
here = threading.Barrier(16)

def allocate():
    here.wait()
    for _ in range(1000):
        libc.malloc(ctypes.c_size_t(1000))
    here.wait()

threads = [threading.Thread(target=allocate) for _ in range(16)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
file = ctypes.c_void_p(libc.fopen(sys.argv[1].encode(), b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have no arenas")
def test_threads_share_two_heaps(tmp_path):
    heaps = {}
    for how in ("limited", "as it is"):
        subprocess.run([sys.executable, "-c", PROGRAM, tmp_path / "info", how], check=True)
        heaps[how] = (tmp_path / "info").read_text().count("<heap nr=")
    assert heaps["limited"] <= 2 < heaps["as it is"]
