"""`python -m lade`. Floor 8."""

import sys

from lade.commands import main

if __name__ == "__main__":
    sys.exit(main())
