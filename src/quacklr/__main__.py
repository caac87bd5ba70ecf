"""`python -m quacklr` is the command `quacklr`, and `torchrun -m quacklr train` runs it in many processes."""

import sys

from quacklr.cli import main

sys.exit(main())
