"""The draft: proposes how sequences go on.  Its proposals change no output, and its end loses none."""
