"""`python -m services.cli` is `pageant`."""

from services.cli.entry import run

if __name__ == "__main__":
    run()
