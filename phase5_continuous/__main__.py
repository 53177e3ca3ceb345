"""`python -m phase5_continuous` serves this phase."""

from common.server.run import main

if __name__ == "__main__":
    main("phase5_continuous")
