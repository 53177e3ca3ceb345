"""`python -m phase11_tiered` serves this phase."""

from common.server.run import main

if __name__ == "__main__":
    main("phase11_tiered")
