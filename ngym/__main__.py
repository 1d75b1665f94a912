"""`python -m ngym` is `ng`."""

from ngym.cli.main import main

main(prog_name="ng")
