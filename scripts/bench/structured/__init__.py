"""Output held to grammars: what hostile ones cost those who did not send them, and what engines cost."""
