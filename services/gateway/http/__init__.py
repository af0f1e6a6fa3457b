"""The HTTP front: the API that the field's clients speak, over the gateway's own admission and streams."""
