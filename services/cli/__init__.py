"""The `pageant` command: starts the services on one machine, talks to them, and says what is wrong."""
