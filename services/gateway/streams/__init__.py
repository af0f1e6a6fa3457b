"""Open streams: the journal of what each was sent, their recovery, when they send, and what is told of them."""
