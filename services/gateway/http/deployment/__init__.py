"""How the deployment does, and what an operator may do to it: for the page, and for programs that look after it."""
