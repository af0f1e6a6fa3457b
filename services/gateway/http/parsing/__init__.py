"""What a model's text says in the format it was trained on: reasoning, calls of tools, and the rest.

Parsers read text as it comes.  What they put out depends on the text alone, never on where it was cut; they work in
time linear in it, without backtracking, and no text makes them fail: what is no call after all is content.
"""
