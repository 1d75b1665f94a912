"""`python -m ngym` is `ng`."""

from ngym.cli.shell.main import main

main(prog_name="ng")
