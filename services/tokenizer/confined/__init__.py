"""Child processes of the tokenizer: confined, killed where they take too long; and the jobs that they do."""
