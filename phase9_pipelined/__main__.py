"""`python -m phase9_pipelined` serves this phase."""

from common.server.run import main

if __name__ == "__main__":
    main("phase9_pipelined")
