"""`python -m phase4_static` serves this phase."""

from common.server.run import main

if __name__ == "__main__":
    main("phase4_static")
