"""`python -m specedge`."""

from specedge.cli import main

if __name__ == "__main__":
    main()
