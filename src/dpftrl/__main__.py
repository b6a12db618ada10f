"""`python -m dpftrl` is the `dpftrl` command."""

from dpftrl.cli import start

if __name__ == "__main__":
    start()
