"""The command line as `python -m inferc`, which works where the package is not installed too."""

from inferc.cli.main import main

main()
