"""`python -m services.cli` is `pageant`."""

from services.cli.command_line.entry import run

if __name__ == "__main__":
    run()
