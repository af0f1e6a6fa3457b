"""Errors as clients get them, with the names of fields that they used."""
