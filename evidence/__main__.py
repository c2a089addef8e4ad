"""The former name of ``python -m lab``, kept for commands that were written down before."""

from lab.__main__ import main

if __name__ == "__main__":
    main()
