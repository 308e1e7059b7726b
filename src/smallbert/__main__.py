"""`python -m smallbert` is `smallbert`."""

import sys

from smallbert.cli import main

sys.exit(main())
