"""`python -m jaxckpt`: the command line."""

import sys

from jaxckpt.cli import main

sys.exit(main())
