"""`python -m dpftrl` is the `dpftrl` command."""

from dpftrl.cli.main import main

if __name__ == "__main__":
    main()
