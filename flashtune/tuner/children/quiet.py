"""First import of the fork server: its output is dropped, and no pipe of the command waits for its end."""

import os

_nowhere = os.open(os.devnull, os.O_WRONLY)
os.dup2(_nowhere, 1)
os.dup2(_nowhere, 2)
os.close(_nowhere)
