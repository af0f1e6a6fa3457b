"""What a client is told of what went wrong, in the names that it used."""
