"""What chats, responses and messages have in common: what is said to a model, its tools, and how its answer is read."""
