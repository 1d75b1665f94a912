"""The commands: one small file each."""

import os
import signal
import sys

# While a script of ours still imports, Ctrl-C ends it without a word; `ended` takes over.
if os.path.basename(sys.argv[0]).startswith("ng") and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
