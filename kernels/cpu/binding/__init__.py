"""The native library: built, loaded, compared with the references, and called."""
