"""What hostile grammars cost other clients."""
