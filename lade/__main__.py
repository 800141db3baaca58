"""`python -m lade`."""

import sys

from lade.commands import main

if __name__ == "__main__":
    sys.exit(main())
