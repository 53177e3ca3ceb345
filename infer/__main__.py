"""`python -m infer` is `infer`."""

import sys

from infer import main

if __name__ == "__main__":
    sys.exit(main())
