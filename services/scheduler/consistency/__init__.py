"""Whether scheduler and workers agree, and setting right what differs."""
