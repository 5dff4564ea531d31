"""`python -m tripwire` is `tripwire`."""

from tripwire.cli import main

main()
