"""`python -m phase10_speculative` serves this phase."""

from common.server.run import main

if __name__ == "__main__":
    main("phase10_speculative")
