"""`python -m phase7_chunked` serves this phase."""

from common.server.run import main

if __name__ == "__main__":
    main("phase7_chunked")
