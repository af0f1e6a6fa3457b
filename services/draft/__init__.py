"""The draft: guesses how sequences go on.  Whatever it says, it changes no output; whenever it dies, none is lost."""
