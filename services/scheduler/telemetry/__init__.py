"""What is noted of decisions: counters, events, reasons of prefix misses, step lines."""
