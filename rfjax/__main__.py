import sys

from rfjax.cli import main

sys.exit(main())
