"""The processes of `pageant serve`: started, forked, watched, replaced."""
