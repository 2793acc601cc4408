"""`python -m iwarp ARGUMENTS` becomes the command `iwarp ARGUMENTS`."""

import os
import sys

from . import find_command

try:
    command = find_command()
except FileNotFoundError as error:
    sys.exit("iwarp: {}".format(error))
os.execv(command, [command] + sys.argv[1:])
