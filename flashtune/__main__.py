"""`python -m flashtune`: the command line."""

from flashtune.cli.main import main

main(prog_name="flashtune")
