"""Shared by the test programs of this directory: memory with known contents, and files.

The two processes of a test exchange data through the files.
"""

import ctypes
import os
import random
import sys
import time

LIMIT_S = 60


def noise(seed, size):
    """Returns `size` bytes that depend on the seed."""
    return random.Random(seed).randbytes(size)


class Memory:
    """A memory buffer with a known address, initialized with `content`."""

    def __init__(self, content):
        self.size = len(content)
        self._buffer = ctypes.create_string_buffer(content, self.size)
        self.address = ctypes.addressof(self._buffer)

    def content(self):
        return self._buffer.raw

    def check(self, wanted, what):
        """Exits with an error unless the memory contains `wanted`."""
        found = self.content()
        if found != wanted:
            at = next(i for i in range(self.size) if found[i] != wanted[i])
            sys.exit(f"{what}: wrong at byte {at} of {self.size}")
        print(f"{what}: correct", flush=True)


def publish(name, content):
    """Creates a file atomically, for `await_file` of the other process."""
    with open(name + ".new", "wb") as file:
        file.write(content)
    os.rename(name + ".new", name)


def await_file(name):
    """Waits until the other process publishes a file, and returns its content."""
    wait_until(lambda: os.path.exists(name), f"the other process did not publish the file {name}")
    with open(name, "rb") as file:
        return file.read()


def wait_until(condition, problem):
    """Waits until the condition is true. Exits with `problem` after LIMIT_S."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            sys.exit(problem)
        time.sleep(0.002)
