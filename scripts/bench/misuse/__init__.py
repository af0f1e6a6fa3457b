"""What misuse of a gateway, by large requests and by hostile grammars, costs other clients."""
