"""Text and chats to token ids; chat templates run in child processes that can be killed."""
