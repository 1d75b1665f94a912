"""The command line: one module per command."""

import os
import signal
import sys

# While a script of ngym still imports its modules, Ctrl-C ends it silently; later `shell.main.run_command` handles it.
if os.path.basename(sys.argv[0]).startswith("ng") and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
