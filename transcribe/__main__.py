"""`python -m transcribe`."""

import sys

from .cli import main

sys.exit(main())
