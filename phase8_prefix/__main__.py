"""`python -m phase8_prefix` serves this phase."""

from common.server.run import main

if __name__ == "__main__":
    main("phase8_prefix")
