"""iWARP, RDMA over plain TCP in user space.

This package installs the command `iwarp` and the libraries that it gives to RDMA programs.
`python -m iwarp` starts the command, also if its folder is not in PATH.
"""

import os
import sys
import sysconfig


def find_command():
    """Return the path of the command that belongs to this package.

    Raise FileNotFoundError if it is not there, for example because it was removed by hand.
    """
    # `pip install --target DIR` puts the command into DIR/bin and this package into DIR.
    target = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    folders = [
        sysconfig.get_path("scripts"),
        sysconfig.get_path("scripts", scheme=_user_scheme()),
        os.path.join(target, "bin"),
        # `pip install --prefix DIR`: this package is in DIR/lib/pythonX.Y/site-packages.
        os.path.normpath(os.path.join(target, "..", "..", "..", "bin")),
        os.path.dirname(sys.executable or ""),
    ]
    for folder in folders:
        command = os.path.join(folder, "iwarp")
        if os.access(command, os.X_OK) and _has_libraries(folder):
            return command
    raise FileNotFoundError(
        "the command iwarp of this package is in none of these folders: " + ", ".join(folders)
    )


def _user_scheme():
    if hasattr(sysconfig, "get_preferred_scheme"):
        return sysconfig.get_preferred_scheme("user")
    return "posix_user"


def _has_libraries(folder):
    """Tell whether the libraries are where a command in this folder finds them."""
    return os.path.exists(os.path.join(folder, "..", "lib", "iwarp", "libibverbs.so.1"))
