"""`python -m gpuprov` is `gpuprov`."""

from gpuprov.cli import main

main()
