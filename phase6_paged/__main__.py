"""`python -m phase6_paged` serves this phase."""

from common.server.run import main

if __name__ == "__main__":
    main("phase6_paged")
