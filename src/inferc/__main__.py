"""`python -m inferc`: the command line, also where the package is not installed."""

from inferc.cli.main import main

main()
