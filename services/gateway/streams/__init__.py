"""Open streams: the journal of what each was sent, recovery, pacing of writes, and reports."""
